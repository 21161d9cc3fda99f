"""Wanda, SparseGPT and OWL against plain code on whole models; blocks, experts and memory."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.mask import bitmap
from samo.mask.masks import Masks
from samo.pruning import sparsegpt
from samo.pruning.blocks import BlockModel
from samo.pruning.prune import prune
from samo.pruning.scope import owl_counts
from tests.meters import Experts, NewBytes
from tests.pruning.language_models import FAMILIES, Stack, batches, in_order, language_model
from tests.pruning.published import blocks_of, reference, wanda_keep

CALIBRATED = ["wanda", "sparsegpt"]


@pytest.fixture
def _double() -> Iterator[None]:
    """Compute in float64, where no two scores are so near that rounding could swap them."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("family", ["gpt2", "llama", "samo"])
@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize(("sparsity", "pattern"), [(0.7, None), (0.5, (2, 4)), (0.625, (3, 8))])
def test_masks_and_weights_are_those_of_the_published_formulas(
    family: str, method: Any, sparsity: float, pattern: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsegpt, "_COLUMNS", 24)  # several ranges of columns, also uneven ones
    model, data = language_model(family).double(), batches()
    plain = copy.deepcopy(model)
    before = {name: param.clone() for name, param in model.named_parameters()}
    expected = reference(plain, data, method, sparsity, pattern, 24)
    text = pattern and "{}:{}".format(*pattern)
    masks = prune(model, sparsity, method=method, pattern=text, calibration=data)
    assert list(masks) == samo.prunable(model) == list(expected)
    for name, keep in expected.items():
        assert torch.equal(masks[name].to_bool(), keep), name
        numel = keep.numel()
        assert masks[name].kept == numel - round(numel * sparsity)
    if method == "sparsegpt":
        for name, keep in expected.items():
            found = model.get_parameter(name).detach()
            assert not found[~keep].any()
            # Two orders of the same sums, and two ways to invert a matrix of condition 1e5.
            torch.testing.assert_close(found, plain.get_parameter(name), rtol=1e-9, atol=1e-9)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == (set(masks) if method == "sparsegpt" else set())


def test_wanda_in_float32_and_over_several_chunks_is_equal_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bitmap, "_CHUNK_BLOCKS", 1)
    model, data = language_model("llama", hidden_size=64, intermediate_size=96), batches()
    expected = reference(copy.deepcopy(model), data, "wanda", 0.6, None, 128)
    masks = prune(model, 0.6, method="wanda", calibration=data)
    assert all(torch.equal(masks[name].to_bool(), keep) for name, keep in expected.items())


# Blocks


@pytest.mark.parametrize("family", [*FAMILIES, "samo"])
def test_blocks_are_given_what_the_model_gives_them(family: str) -> None:
    model, data = language_model(family), batches(2)
    model.eval()
    given: list[list[Tensor]] = [[] for _ in blocks_of(model)]
    hooks = [
        block.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
        for block, seen in zip(blocks_of(model), given)
    ]
    with torch.no_grad():
        for batch in data:
            model(batch)
    for hook in hooks:
        hook.remove()
    model.train()
    wanted = {name: model.get_parameter(name) for name in samo.prunable(model)}
    held: list[dict[str, Tensor]] = []
    for (weights, run), expected in zip(BlockModel(model, data).walk(wanted), given, strict=True):
        assert all(map(torch.equal, run(), expected))
        assert weights
        assert not any(held), "the copies of the block before are gone"
        held.append(weights)
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())
    assert not any("forward" in vars(block) for block in blocks_of(model))
    assert getattr(getattr(model, "config", None), "use_cache", True)


def test_inputs_may_be_dicts_and_the_iterable_may_be_read_once() -> None:
    model, data = language_model("llama"), batches()
    expected = prune(model, 0.5, method="wanda", calibration=data)
    named = ({"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in data)
    assert prune(model, 0.5, method="wanda", calibration=named) == expected


@pytest.mark.parametrize("method", CALIBRATED)
def test_bfloat16_models_are_pruned_in_float32(method: Any) -> None:
    model = language_model("llama").bfloat16()
    masks = prune(model, 0.5, method=method, calibration=batches())
    assert masks.sparsity == 0.5
    masks.apply_(model)
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(("scope", "total"), [("tensor", 2), ("owl", 4)])
def test_progress_counts_blocks(scope: Any, total: int) -> None:
    calls: list[tuple[int, int]] = []
    prune(
        language_model("llama"),
        0.5,
        method="wanda",
        scope=scope,
        calibration=batches(1),
        progress=lambda *done: calls.append(done),
    )
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_a_weight_of_two_blocks_gets_one_mask_and_is_pruned_in_both() -> None:
    model = Stack(3, 16, in_order)
    model.layers[1].weight = model.layers[0].weight
    data = [torch.randn(50, 16)]
    masks = prune(model, 0.5, method="wanda", calibration=data)
    assert list(masks) == ["layers.0.weight", "layers.2.weight"]
    masked = copy.deepcopy(model)
    masks.apply_(masked)
    x = masked.layers[1](masked.layers[0](data[0]))
    expected = wanda_keep(model.layers[2].weight.detach(), [x.detach()], 0.5, None)
    assert torch.equal(masks["layers.2.weight"].to_bool(), expected)


# Memory


@pytest.mark.parametrize("method", CALIBRATED)
def test_memory_is_one_block_and_the_calibration_activations(method: Any) -> None:
    width, inner = 128, 512
    data = batches(4, 2, 16)
    peaks = {}
    for layers in (2, 6):
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
        model = language_model("llama", **sizes)
        with NewBytes() as meter:
            masks = prune(model, 0.5, method=method, calibration=data)
        peaks[layers] = meter.peak_bytes - sum(mask.nbytes for mask in masks.values())
    assert peaks[6] <= 1.02 * peaks[2]  # whatever the number of blocks
    block = sum(param.nbytes for param in blocks_of(model)[0].parameters())
    activations = len(data) * 2 * 16 * width * 4
    if method == "wanda":  # scores, and what sorting them takes
        work = width * inner * (4 + 8 * 5)
    else:  # the products of all inputs, the largest three times more, and tables of counts
        work = 4 * (6 * width**2 + inner**2) + 3 * 4 * inner**2 + 3 * 8 * 2**16
    assert peaks[6] <= block + activations + work


# Experts


def expert_inputs(model: nn.Module, data: list[Tensor], path: str) -> list[dict[str, Tensor]]:
    """Return the inputs of both matrices of each expert, in float64, from what the router chose."""
    experts = model.get_submodule(path)
    given: list[tuple[Tensor, ...]] = []
    hook = experts.register_forward_pre_hook(lambda _, args: given.append(args))
    with torch.no_grad():
        for batch in data:
            model(batch)
    hook.remove()
    found = []
    for expert in range(experts.num_experts):
        x = torch.cat([hidden[(chosen == expert).any(1)] for hidden, chosen, _ in given])
        gate, up = (x @ experts.gate_up_proj[expert].t()).chunk(2, dim=-1)
        found.append({"gate_up_proj": x, "down_proj": (experts.act_fn(gate) * up).detach()})
    return found


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_an_expert_is_pruned_by_the_tokens_that_reach_it(family: str, implementation: str) -> None:
    model, data = language_model(family), batches()
    model.set_experts_implementation(implementation)
    masks = prune(model, 0.5, method="wanda", calibration=data)
    path = "model.layers.0.mlp.experts"
    for expert, inputs in enumerate(expert_inputs(model.eval(), data, path)):
        for name, x in inputs.items():
            weight = model.get_parameter(f"{path}.{name}").detach()[expert]
            expected = wanda_keep(weight, [x], 0.5, None)
            found = masks[f"{path}.{name}"].to_bool()[expert]
            # Sums over tokens in another order: a near tie may fall the other way.
            assert (found != expected).float().mean() < 0.002
            assert torch.equal(found.sum(1), torch.full((len(weight),), weight.shape[1] // 2))


@pytest.mark.parametrize("method", CALIBRATED)
def test_experts_that_few_tokens_reach_are_pruned_by_magnitude(
    method: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList([Experts(3, 16)])
    model.forward = lambda x: model.blocks[0](x)  # type: ignore[method-assign]
    before = model.blocks[0].experts.up.detach().clone()
    with torch.no_grad():  # tokens choose by the sign of their first entry; none takes expert 2
        model.blocks[0].router.weight.zero_()[0, 0] = 1
        model.blocks[0].router.weight[1, 0] = -1
    x = torch.randn(200, 16)
    x[:, 0] = 1
    x[:31, 0] = -1
    with caplog.at_level(logging.WARNING, logger="samo"):
        masks = prune(model, 0.5, method=method, calibration=[x])
    assert "fewer than 32 tokens reach 2 of the 3 experts of 'blocks.0.experts.up'" in caplog.text
    keep = masks["blocks.0.experts.up"].to_bool()
    ones = [torch.ones(1, 16)]
    for expert in (1, 2):
        weight = before[expert].t()
        if method == "wanda":
            assert torch.equal(keep[expert].t(), wanda_keep(weight, ones, 0.5, None))
        else:
            assert torch.equal(keep[expert], before[expert].abs() > before[expert].abs().median())
            after = model.blocks[0].experts.up.detach()[expert]
            assert torch.equal(after, before[expert] * keep[expert])  # nothing else changed
    if method == "wanda":
        assert torch.equal(keep[0].t(), wanda_keep(before[0].t(), [x[31:]], 0.5, None))


# OWL


def test_owl_counts_are_exact_and_follow_the_published_formula() -> None:
    numels, ratios = [1000, 1000, 1000, 1000], [0.1, 0.2, 0.4, 0.1]
    counts = owl_counts(numels, ratios, 0.7)
    scaled = torch.tensor([0, 1 / 3, 1, 0]) * 0.16
    expected = 1000 * (0.3 + scaled - scaled.mean())
    assert torch.tensor(counts).sub(expected).abs().max() < 1
    assert sum(counts) == 1200
    assert sum(owl_counts([999, 77, 501], [0.3, 0.1, 0.2], 0.123)) == 1577 - round(1577 * 0.123)
    assert owl_counts([100, 100], [0.1, 0.1], 0.5) == [50, 50]
    assert owl_counts([100, 100], [0.1, 0.2], 0.9) == [5, 15]  # 2 and 18 would be too far apart
    assert owl_counts([100, 100], [0.1, 0.2], 0.05) == [90, 100]  # 103 are not there


@pytest.mark.parametrize("method", ["magnitude", *CALIBRATED])
def test_blocks_with_more_outliers_keep_more(method: Any) -> None:
    model, data = language_model("llama", num_hidden_layers=3), batches()
    spiky = model.get_submodule("model.layers.1.mlp")
    with torch.no_grad():
        for param in spiky.parameters():
            param.view(-1)[::97] *= 100
    masks = prune(model, 0.7, method=method, scope="owl", calibration=data)
    assert masks.kept == masks.numel - round(masks.numel * 0.7)
    parts = [
        Masks({name: mask for name, mask in masks.items() if f"layers.{i}." in name})
        for i in range(3)
    ]
    assert parts[1].sparsity < min(parts[0].sparsity, parts[2].sparsity) - 0.05
    for part in parts:  # the same for all matrices of a block
        assert all(abs(mask.sparsity - part.sparsity) < 2e-3 for mask in part.values())


# Other settings


@pytest.mark.parametrize("method", CALIBRATED)
def test_skip_rules_and_erk_keep_their_meaning(method: Any) -> None:
    data = batches(1)
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    how: Any = {"skip": [names[0]], "rules": {names[1]: 0.25}}
    masks = prune(language_model("llama"), 0.5, method=method, calibration=data, **how)
    assert names[0] not in masks
    assert masks[names[1]].sparsity == 0.25
    masks = prune(language_model("llama"), 0.5, method=method, scope="erk", calibration=data)
    expected = prune(language_model("llama"), 0.5, scope="erk")
    assert {n: m.kept for n, m in masks.items()} == {n: m.kept for n, m in expected.items()}


def test_ties_are_broken_by_the_seed() -> None:
    model = Stack(2, 32, in_order)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.fill_(1)
    data = [torch.ones(4, 32)]
    one, same, other = (
        prune(model, 0.5, method="wanda", calibration=data, seed=seed) for seed in (0, 0, 1)
    )
    assert one == same != other
    assert torch.equal(one["layers.0.weight"].to_bool().sum(1), torch.full((32,), 16))


def test_inputs_that_are_always_zero_are_pruned_first() -> None:
    data = [torch.randn(50, 16) * (torch.arange(16) >= 4)]
    for method in CALIBRATED:
        model = Stack(1, 16, in_order)
        keep = prune(model, 0.5, method=method, calibration=data)["layers.0.weight"]  # type: ignore[arg-type]
        assert not keep.to_bool()[:, :4].any()
        assert model.layers[0].weight.isfinite().all()


class Mixer(nn.Module):
    """Its first layer gets inputs that are not contiguous, and multiplies an expanded weight."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.along = nn.Linear(10, 10), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.along(x + self.across(x.mT).mT)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        attention = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.ModuleList([Mixer(), attention])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_inputs_of_any_strides_and_attention_of_torch_are_seen(
    method: Any, needs_grad: bool
) -> None:
    torch.manual_seed(0)
    model = Mixed().requires_grad_(needs_grad)
    data = [torch.randn(3, 10, 32) for _ in range(2)]
    scores = model.layers[0].across.weight.detach().abs()  # type: ignore[union-attr, operator]
    scores = scores * torch.cat(data).mT.flatten(0, 1).norm(dim=0)
    masks = prune(model, 0.5, method=method, calibration=data)
    assert len(masks) == 6
    if method == "wanda":
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(1, scores.topk(5, dim=1).indices, True)
        assert torch.equal(masks["layers.0.across.weight"].to_bool(), kept)
    assert torch.backends.mha.get_fastpath_enabled()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("method", CALIBRATED)
def test_blocks_are_computed_on_another_device(method: Any) -> None:
    model, data = language_model("llama").double(), batches()
    other = copy.deepcopy(model)
    expected = prune(model, 0.5, method=method, calibration=data)
    found = prune(other, 0.5, method=method, calibration=data, device="cuda")
    assert found == expected
    for one, two in zip(model.parameters(), other.parameters()):
        assert two.device.type == "cpu"
        # The inverses of SparseGPT's Hessians magnify how devices round.
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
