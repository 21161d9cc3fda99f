"""Modules whose parameters are replaced: classes, names, writes, copies, state dicts."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import samo
from samo.core.compress import masks as masks_of
from samo.core.modules import BITMAP, named_weights
from samo.errors import CompressionError
from tests.core.twins import (
    X,
    assert_equal,
    batches,
    compressed,
    hugging_face,
    loss_of,
    mlp,
    pruned_entries,
    random_masks,
    step,
    twins,
    worst,
)
from tests.meters import ignores_dynamo, saved_for_backward


def kept(model: nn.Module, name: str = "0.weight") -> Tensor:
    """Return which entries of a weight are kept."""
    return masks_of(model)[name].to_bool()


# Class ------------------------------------------------------------------------------------------


def test_equal_modules_share_one_class_that_looks_like_the_original() -> None:
    one, two = compressed(), compressed()
    assert type(one[0]) is type(one[2]) is type(two[0]) is not nn.Linear
    assert isinstance(one[0], nn.Linear)
    assert type(one[0]).__name__ == "Linear"
    assert type(one[0]).__module__ == nn.Linear.__module__
    assert repr(one) == repr(mlp())
    values = dict(one.named_parameters())["0.weight"]
    assert one.get_parameter("0.weight") is one[0].get_parameter("weight") is values


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_pickle_and_torch_save_of_the_model_go_on_training_exactly(weights: Any) -> None:
    model = compressed(torch.bfloat16, grad_dtype=torch.bfloat16, weights=weights)
    opt = samo.AdamW(model.parameters(), lr=0.01, kernels="reference")
    for x in batches(3, dtype=torch.bfloat16):
        step(model, opt, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        own = samo.AdamW(copied.parameters(), lr=0.01, kernels="reference")
        own.load_state_dict(opt.state_dict())
        twin, twin_opt = copy.deepcopy((model, opt))
        for x in batches(3, dtype=torch.bfloat16, seed=2):
            step(copied, own, x)
            step(twin, twin_opt, x)
        assert twin_opt.state.keys() == set(twin.parameters())  # copied together
        values = [param.grad_dtype for param in copied.parameters()]
        assert values == [torch.bfloat16, torch.float32] * 2  # weights and biases
        assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), twin.parameters()))
        assert type(copied[0]) is type(model[0])


def test_a_registry_of_subclasses_is_left_alone() -> None:
    class Registered(nn.Linear):
        known: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, key: str) -> None:
            Registered.known.append(key)

    class Net(Registered, key="net"):
        pass

    samo.compress_(model := Net(8, 8), samo.prune(model, 0.5, skip=()))
    assert Registered.known == ["net"]
    model(torch.ones(1, 8)).sum().backward()


# Identity ---------------------------------------------------------------------------------------


def test_a_language_model_ties_its_weights_again() -> None:
    model = hugging_face("gpt2")
    embedding, masks = "transformer.wte.weight", random_masks(model)
    samo.compress_(model, masks)
    model.tie_weights()
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is inputs.weight
    assert head._parameters["weight"] is model.get_parameter(embedding)
    ids = torch.arange(10)[None]
    model(ids, labels=ids).loss.backward()
    assert model.get_parameter(embedding).grad.shape == (masks[embedding].kept,)


def test_resizing_an_embedding_grows_a_dense_one_and_is_refused_for_a_pruned_one() -> None:
    model = hugging_face("gpt2")
    samo.compress_(model, samo.prune(model, 0.5))
    old = model.get_input_embeddings().weight.detach().clone()
    with warnings.catch_warnings(action="ignore"):
        model.resize_token_embeddings(140, mean_resizing=False)
    assert torch.equal(model.get_input_embeddings().weight[:131], old)
    ids = torch.arange(10)[None] + 125
    model(ids, labels=ids).loss.backward()
    assert all(
        param.grad.shape == param.shape for param in model.parameters() if param.grad is not None
    )
    assert model.get_input_embeddings().weight.shape == (140, 32)
    model = hugging_face("gpt2")
    mask = samo.Mask.from_bool(model.transformer.wte.weight > 0)
    samo.compress_(model, samo.Masks({"transformer.wte.weight": mask}))
    with pytest.raises(samo.CompressionError, match=r"cannot be assigned \(140, 32\); call samo"):
        model.resize_token_embeddings(140, mean_resizing=False)


# Writes -----------------------------------------------------------------------------------------


def add_to_data(model: nn.Module) -> None:
    """What peft does to merge an adapter."""
    model[0].weight.data += 0.125


def multiply(model: nn.Module) -> None:
    model[0].weight *= 2


# A write, and what it does to the dense weight.
WRITES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Any]]] = {
    "init": (lambda m: nn.init.constant_(m[0].weight, 0.5), lambda w: w.fill_(0.5)),
    "in place": (lambda m: m[0].weight.mul_(2), lambda w: w.mul_(2)),
    "*=": (multiply, lambda w: w.mul_(2)),
    "copy_": (lambda m: m[0].weight.copy_(m[0].weight * 2), lambda w: w.mul_(2)),
    "out=": (lambda m: torch.mul(m[0].weight, 3, out=m[0].weight), lambda w: w.mul_(3)),
    "a row": (lambda m: m[0].weight.__setitem__(3, 0.25), lambda w: w[3].fill_(0.25)),
    "rows": (lambda m: [row.mul_(2) for row in m[0].weight], lambda w: w.mul_(2)),
    "a view": (lambda m: m[0].weight.view(-1)[3:9].fill_(1), lambda w: w.view(-1)[3:9].fill_(1)),
    "transposed": (lambda m: m[0].weight.t().mul_(3), lambda w: w.mul_(3)),
    "detached": (lambda m: m[0].weight.detach().mul_(2), lambda w: w.mul_(2)),
    "a row of data": (lambda m: m[0].weight.data[0].fill_(2), lambda w: w[0].fill_(2)),
    "data": (lambda m: m[0].weight.data.mul_(2), lambda w: w.mul_(2)),
    "data +=": (add_to_data, lambda w: w.add_(0.125)),
    "data =": (
        lambda m: setattr(m[0].weight, "data", torch.full((32, 12), 0.75)),
        lambda w: w.fill_(0.75),
    ),
    "a parameter": (
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.full((32, 12), 0.375))),
        lambda w: w.fill_(0.375),
    ),
    "registered": (
        lambda m: m[0].register_parameter("weight", nn.Parameter(torch.full((32, 12), 0.25))),
        lambda w: w.fill_(0.25),
    ),
    "values": (lambda m: m.get_parameter("0.weight").mul_(2), lambda w: w.mul_(2)),
    "values' data": (
        lambda m: setattr(m.get_parameter("0.weight"), "data", torch.full((192,), 0.5)),
        lambda w: w.fill_(0.5),
    ),
    "foreach": (lambda m: torch._foreach_mul_(list(m.parameters()), 2.0), lambda w: w.mul_(2)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "then", ["forward", "step", "state_dict", "copy", "to", "no_grad", "remap"]
)
@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.filterwarnings("ignore:nonzero values were written to pruned entries")
def test_a_write_reaches_the_values_and_the_dense_weight(
    name: str, then: str, weights: Any
) -> None:
    model = compressed(weights=weights)
    model(X).sum().backward()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    keep, fewer = kept(model), samo.prune(model, 0.75)
    new = model[0].weight.detach().clone()
    write, change = WRITES[name]
    with torch.inference_mode() if then == "forward" else torch.no_grad():
        write(model)
    change(new)
    expected = new.where(keep, 0)
    if then in ("forward", "no_grad"):
        with torch.set_grad_enabled(then == "forward"):
            assert torch.equal(model[0](X), nn.functional.linear(X, expected, model[0].bias))
    elif then == "step":
        opt.step()
    elif then == "state_dict":
        assert torch.equal(model.state_dict()["0.weight"], expected[keep])
    elif then == "copy":
        model = copy.deepcopy(model)
    elif then == "to":
        model.to(torch.float64)
        model.to(torch.float32)
    elif then == "remap":
        samo.remap_(model, fewer, opt)
        keep = kept(model)
        expected = expected.where(keep, 0)
    assert torch.equal(model[0].weight, expected)
    assert torch.equal(model.get_parameter("0.weight"), expected[keep])


def test_values_that_are_replaced_twice_are_noticed() -> None:
    """The second replacement may get the memory, and so the address, of the first values."""
    model = compressed()
    values = model.get_parameter("0.weight")
    for _ in range(100):
        values.data = values.data * 0.5
        values.data = values.data + 1
        assert torch.equal(model[0].weight[kept(model)], values)


def test_a_write_to_pruned_entries_is_undone_with_one_warning() -> None:
    model = compressed()
    nn.init.ones_(model[0].weight)
    with pytest.warns(UserWarning, match="nonzero values were written to pruned entries") as caught:
        model(X)
    assert caught[0].filename == __file__
    assert not pruned_entries(model).any()
    with warnings.catch_warnings(action="error"):
        model(X)


def test_writes_on_both_sides_are_refused() -> None:
    model = compressed()
    with torch.no_grad():
        model[0].weight.mul_(2)
        model.get_parameter("0.weight").mul_(3)
    with pytest.raises(samo.CompressionError, match=r"'0.weight' was written in two ways"):
        model(X)


def test_a_write_to_a_16_bit_weight_leaves_other_entries_their_digits() -> None:
    model = compressed(torch.bfloat16)
    before = model.get_parameter("0.weight").detach().clone()
    with torch.no_grad():
        model[0].weight[5] *= 2
    model(X.bfloat16())
    row = torch.arange(32)[:, None].expand(32, 12)[kept(model)] == 5
    after = model.get_parameter("0.weight")
    assert torch.equal(after[~row], before[~row])
    assert torch.equal(after[row], before[row].bfloat16().float() * 2)


def test_the_dense_gradient_is_read_and_written_through_the_weight() -> None:
    model, dense = twins(mlp())
    for net in (model, dense):
        loss_of(net, torch.ones(2, 12)).backward()
    assert torch.equal(model[0].weight.grad, dense[0].weight.grad)
    model[0].weight.grad.zero_()  # of a copy: see docs/limits.md
    assert torch.equal(model[0].weight.grad, dense[0].weight.grad)
    model[0].weight.grad = torch.ones(32, 12)
    assert torch.equal(model.get_parameter("0.weight").grad, torch.ones(38))
    model[0].weight.grad = None
    assert model.get_parameter("0.weight").grad is None


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_weight_is_frozen_and_trained_again(weights: Any) -> None:
    model = compressed(torch.bfloat16, weights=weights)
    opt = samo.AdamW(model.parameters(), lr=0.1)
    assert not model[0].weight.requires_grad_(False).requires_grad
    assert not model.get_parameter("0.weight").requires_grad
    before = model[0].weight.detach().clone()
    step(model, opt, X.bfloat16())
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    model[0].weight.requires_grad = True
    step(model, opt, X.bfloat16())
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_is_set_to_none_is_gone(name: str) -> None:
    model = compressed(torch.bfloat16)
    setattr(model[0], name, None)
    assert getattr(model[0], name) is None
    assert f"0.{name}" not in {name for name, _ in named_weights(model)}
    assert not any(key.startswith(f"0.{name}") for key in model.state_dict())
    assert getattr(copy.deepcopy(model).to(torch.float32)[0], name) is None
    assert getattr(samo.decompress_(model)[0], name) is None


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_model_that_inference_mode_restores_goes_on_training(
    weights: Any, tmp_path: Path
) -> None:
    model = compressed(weights=weights)
    opt = torch.optim.AdamW(model.parameters())
    step(model, opt, X)
    with torch.inference_mode():
        samo.save(tmp_path, model, opt)
        samo.load(tmp_path, model, opt)
        model.load_state_dict(model.state_dict())
        model.to(torch.float64).to(torch.float32)
        samo.remap_(model, samo.prune(model, 0.7), opt)
    step(model, opt, X)
    with torch.inference_mode():
        samo.decompress_(model)
    step(model, torch.optim.AdamW(model.parameters()), X)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_default_device_is_for_the_caller_alone(weights: Any, tmp_path: Path) -> None:
    """Whatever is made on the device of the parameters says so."""
    model = compressed(weights=weights)
    opt = samo.AdamW(model.parameters(), entry_steps=True)
    with torch.device("meta"):
        step(model, opt, X)
        samo.save(tmp_path, model, opt)
        samo.load(tmp_path, model, opt)
        model.load_state_dict(model.state_dict())
        samo.remap_(model, samo.prune(model, 0.7), opt)
        step(copy.deepcopy(model), torch.optim.SGD(model.parameters()), X)
        samo.ledger(model, opt)
        samo.decompress_(model)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_a_copy_made_in_inference_mode_is_refused() -> None:
    model = compressed()
    with (
        torch.inference_mode(),
        pytest.raises(samo.CompressionError, match="cannot get a tensor made in inference mode"),
    ):
        copy.deepcopy(model)


def test_a_deleted_weight_is_gone_and_can_be_replaced() -> None:
    model = compressed()
    del model[0].weight
    assert not hasattr(model[0], "weight")
    assert "0.weight" not in dict(model.named_parameters())
    assert "0.weight" not in model.state_dict()
    model[0].weight = torch.ones(32, 12)
    assert torch.equal(model[0](X), nn.functional.linear(X, torch.ones(32, 12), model[0].bias))
    del model[0].__dict__["weight"]
    model[0].weight = nn.Parameter(torch.ones(32, 12))
    assert type(model[0].weight) is nn.Parameter
    model(X).sum().backward()
    assert model[0].weight.grad.shape == (32, 12)
    assert [name for name, _ in named_weights(model)] == ["2.weight"]
    assert type(samo.decompress_(copy.deepcopy(model))[0]) is nn.Linear


def test_attributes_of_a_parameter_stay_with_it() -> None:
    model = mlp()
    model[0].weight.width_mult = 2.0
    samo.compress_(model, samo.prune(model, 0.5))
    for net in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.set_grad_enabled(net is model):
            assert net[0].weight.width_mult == 2.0
        assert net.get_parameter("0.weight").width_mult == 2.0
    model[0].weight.seen = True
    model(X)
    assert model[0].weight.seen
    assert samo.decompress_(model)[0].weight.width_mult == 2.0


# Staleness --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "double",
    [lambda p: p.data.mul_(2), lambda p: p.detach().numpy().__imul__(2)],
    ids=["data", "numpy"],
)
def test_values_written_past_torch_are_seen_after_the_next_step_or_load(double: Any) -> None:
    """The writes that torch has no sign of: see docs/limits.md."""
    model = compressed()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    before = model[0].weight.detach().clone()
    double(model.get_parameter("0.weight"))
    assert torch.equal(model[0].weight, before)  # in silence
    model(X).sum().backward()
    opt.step()
    assert torch.equal(model[0].weight, 2 * before)
    double(model.get_parameter("0.weight"))
    model.load_state_dict(model.state_dict())
    assert torch.equal(model[0].weight, 4 * before)
    model = compressed(weights="streamed")
    before = model[0].weight.detach().clone()
    double(model.get_parameter("0.weight"))
    assert torch.equal(model[0].weight, 2 * before)


@ignores_dynamo
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_compiled_code_sees_values_written_by_hand_only_if_streamed(weights: Any) -> None:
    """It does not ask whether a copy is stale: see docs/limits.md."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(12, 6, bias=False))
    samo.compress_(model, samo.prune(model, 0.5), weights=weights)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = run(X).detach()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
    assert torch.equal(run(X), before if weights == "resident" else 2 * before)
    assert torch.equal(model(X), 2 * before)  # eager mode looks
    assert torch.equal(run(X), 2 * before)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(run(X), 4 * before)


# _apply -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.half(), torch.float16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.to(torch.bfloat16), torch.bfloat16),
        (lambda model: model.half().float(), torch.float32),
        (lambda model: model.to("cpu"), torch.float32),
    ],
    ids=["half", "bfloat16", "double", "to", "half-float", "cpu"],
)
@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("flag", ["", "overwrite", "swap"])
def test_a_cast_changes_the_compute_type_and_never_the_values(
    cast: Callable[[nn.Module], nn.Module],
    dtype: torch.dtype,
    weights: Any,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each of the ways in which torch can convert parameters."""
    if flag:
        monkeypatch.setattr(torch.__future__, f"_{flag}_module_params_on_conversion", True)
    model = compressed(weights=weights)
    model(X).sum().backward()
    before = model.get_parameter("0.weight").detach().clone()
    grad = model.get_parameter("0.weight").grad.clone()
    assert cast(model) is model
    values = model.get_parameter("0.weight")
    assert values.dtype == torch.float32
    assert torch.equal(values, before)
    assert torch.equal(values.grad, grad)
    assert model[0].weight.dtype == dtype
    assert model(X.to(dtype)).dtype == dtype
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X.to(dtype))
    assert not torch.equal(values, before)
    assert torch.equal(model[0].weight[kept(model)], values.to(dtype))


def test_channels_last_is_kept_through_a_step_and_a_cast() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    model.to(memory_format=torch.channels_last)
    samo.compress_(model, samo.prune(model, 0.5))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        opt.zero_grad()
        model(x.to(dtype)).float().sum().backward()
        opt.step()
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    samo.decompress_(model)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)


# State dicts ------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.state_dict()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bits: bits.__setitem__(0, bits[0] ^ 1), "the bitmap of '0.weight' is damaged"),
        (lambda bits: bits.copy_(other_bitmap()), "'0.weight' was saved with another mask; "),
        (lambda bits: bits.resize_(5), "the bitmap of '0.weight' does not fit the model"),
        (None, f'Missing key.*"0.weight{BITMAP}"'),
    ],
    ids=["damaged", "other", "short", "missing"],
)
def test_a_state_with_a_wrong_bitmap_is_refused(change: Any, message: str) -> None:
    model = compressed()
    state = state_of(model)
    assert state[f"0.weight{BITMAP}"].dtype == torch.uint8
    assert not dict(model.named_buffers())  # DDP would send them in every pass
    if change is None:
        del state[f"0.weight{BITMAP}"]
    else:
        change(state[f"0.weight{BITMAP}"])
        state["0.weight"].zero_()
    before = model.get_parameter("0.weight").detach().clone()
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)
    assert torch.equal(model.get_parameter("0.weight"), before)


def other_bitmap() -> Tensor:
    torch.manual_seed(1)
    return state_of(compressed())[f"0.weight{BITMAP}"]


def test_a_dense_state_dict_is_taken_with_one_warning() -> None:
    model, dense = compressed(), mlp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python's own, which shows a text once
        model.load_state_dict(dense.state_dict())
    assert [str(one.message).split(",")[0] for one in caught] == [
        "nonzero values were written to pruned entries"
    ]
    assert caught[0].filename == __file__
    masks = masks_of(model)
    masks.apply_(dense)
    assert_equal(model, dense)
    with warnings.catch_warnings(action="error"):
        model.load_state_dict(dense.state_dict())  # zeros where pruned


def test_a_dense_state_dict_shares_no_memory_with_the_model() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    samo.compress_(model, samo.Masks({"0.weight": samo.prune(model, 0.5)["0.weight"]}),
                   dtype=torch.bfloat16)  # fmt: skip
    state = samo.dense_state_dict(model)
    assert [value.dtype for value in state.values()] == [torch.float32] * 4
    assert {
        value.dtype for value in samo.dense_state_dict(model, dtype=torch.float16).values()
    } == {torch.float16}
    before = state_of(model)
    for value in state.values():
        value.zero_()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    samo.decompress_(model, dtype=torch.float16)
    assert {param.dtype for param in model.parameters()} == {torch.float16}


def test_extra_state_and_buffers_pass_through() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 3}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

    model = nn.Sequential(Counting(6, 6), nn.BatchNorm1d(6))
    samo.compress_(model, samo.prune(model, 0.5))
    model.load_state_dict(model.state_dict())
    assert model[0].loaded == {"count": 3}
    plain = nn.Sequential(Counting(6, 6), nn.BatchNorm1d(6))
    plain.load_state_dict(samo.dense_state_dict(model))
    ours, theirs = samo.dense_state_dict(model), plain.state_dict()
    assert list(ours) == list(theirs)
    tensors = [name for name, value in theirs.items() if isinstance(value, Tensor)]
    assert all(torch.equal(ours[name], theirs[name]) for name in tensors)


# 1-D --------------------------------------------------------------------------------------------


def test_param_groups_decay_by_the_dense_shape() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    samo.compress_(model, samo.prune(model, 0.5))
    names = {param: name for name, param in model.named_parameters()}
    groups = samo.param_groups(model, weight_decay=0.1, no_decay=["0.*"])
    exempt, decayed = sorted(groups, key=lambda group: group["weight_decay"])
    assert [names[param] for param in decayed["params"]] == ["1.weight"]
    assert decayed["params"][0].dim() == 1  # `p.dim() >= 2` would pass over it
    assert [names[param] for param in exempt["params"]] == [
        "0.weight", "1.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    assert exempt["weight_decay"] == 0.0
    with pytest.raises(ValueError, match="no_decay pattern 'embed' matches no parameter"):
        samo.param_groups(model, weight_decay=0.1, no_decay=["embed"])


def test_pruned_weights_learn_faster_by_the_power_of_their_density() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    samo.compress_(model, samo.prune(model, 0.75))
    groups = samo.param_groups(model, lr=0.01, weight_decay=0.1, density_power=-0.5)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.02, 0.05), (0.01, 0.0)]
    for wrong in (float("nan"), -4, "much"):
        with pytest.raises(ValueError, match="density_power must be a number from -3 to 3"):
            samo.param_groups(model, lr=0.1, density_power=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass lr= here as well"):
        samo.param_groups(model, density_power=-1)
    with pytest.raises(TypeError, match="takes the model, got generator; pass model, without"):
        samo.param_groups(model.parameters(), lr=0.1)  # type: ignore[arg-type]


# Parametrizations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, parametrizations.spectral_norm],
    ids=["weight_norm", "spectral_norm"],
)
def test_a_parametrization_put_on_before_trains_as_masked_dense(wrap: Any) -> None:
    start = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 6)).double()
    wrap(start[0])
    name = next(name for name, param in start.named_parameters() if param.shape == (12, 12))
    assert "parametrizations" in name
    keep = torch.rand(12, 12) < 0.5
    model, dense = twins(start, samo.Masks({name: samo.Mask.from_bool(keep)}))
    assert model.get_parameter(name).shape == (int(keep.sum()),)
    opts = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, dense)]
    for x in batches(10, dtype=torch.float64):
        for net, opt in zip((model, dense), opts):
            step(net, opt, x)
    assert worst(model, dense) < 1e-9


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (
            lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()),
            "register parametrizations before compress_",
        ),
        (lambda m: nn.utils.prune.l1_unstructured(m, "weight", amount=0.5), "non-leaf Tensor"),
        (nn.utils.weight_norm, "apply weight_norm or spectral_norm before compress_"),
        (
            lambda m: setattr(m._replicate_for_data_parallel(), "weight", m.weight.clone()),
            "use DistributedDataParallel instead of DataParallel",
        ),
        (lambda m: nn.utils.spectral_norm(m)(X), "must be|shape|size"),  # of the 1-D values
    ],
    ids=["parametrize", "prune", "weight_norm", "DataParallel", "spectral_norm"],
)
def test_what_would_train_the_weight_without_its_mask_is_refused(wrap: Any, message: str) -> None:
    model = compressed()
    before = model[0].weight.detach().clone()
    with pytest.raises((ValueError, RuntimeError, IndexError), match=message):
        wrap(model[0])
    if "weight" in model[0]._parameters:  # spectral_norm has deleted it
        assert torch.equal(model[0].weight, before)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(12, 12, bias=False) for _ in range(2))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("way", ["assign", "overwrite"])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_tied_weights_that_torch_parts_have_masks_and_values_of_their_own(
    weights: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tied()
    masks = random_masks(model)
    samo.compress_(model, masks, weights=weights)
    if way == "assign":
        state = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        model.double()
    x = X.to(model.a.weight.dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(list(model.parameters())) == 2
    step(model, opt, x)
    assert not torch.equal(model.a.weight, model.b.weight)
    dense, out = samo.dense_state_dict(model), model(x)
    for name in ("a", "b"):
        assert torch.equal(dense[f"{name}.weight"], getattr(model, name).weight)
    mask = masks["a.weight"]
    samo.remap_(model, samo.Masks({"a.weight": mask, "b.weight": mask}), opt)
    torch.testing.assert_close(model(x), out)
    torch.testing.assert_close(samo.decompress_(model)(x.float()), out.float())


def test_values_given_to_another_module_tie_the_two() -> None:
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(2)))
    samo.compress_(model, random_masks(model))
    own: Any = model[0]._parameters["weight"]
    model[1].weight = own
    assert [name for name, _ in named_weights(model)] == ["0.weight"]
    assert torch.equal(model[0].weight, model[1].weight)  # by the mask of the first
    samo.decompress_(model)
    assert model[0].weight is model[1].weight


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("is_pruned", [True, False])
def test_parted_weights_can_be_tied_again(weights: Any, is_pruned: bool) -> None:
    """As ``tie_weights`` of transformers does after ``to_empty``."""
    with torch.device("meta"):
        model = Tied()
        model.c = nn.Linear(12, 12)
    masks = random_masks(model)
    if not is_pruned:
        masks = samo.Masks({"c.weight": masks["c.weight"]})
    samo.compress_(model, masks, weights=weights, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.b.weight = model.a.weight
    for param in model.parameters():
        nn.init.normal_(param)
    assert len(list(named_weights(model))) == len(list(model.parameters())) == 3
    samo.decompress_(model)
    assert model.a.weight is model.b.weight


def test_assigned_values_leave_a_weight_as_it_was() -> None:
    model = compressed(dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for _, weight in named_weights(model):
        assert weight.is_vector or weight.is_resident
        assert weight.dtype == torch.bfloat16
    model(X.bfloat16()).sum().backward()
    assert seen == [(32, 12)]
    assert model[0]._parameters["weight"].grad.dtype == torch.bfloat16


def test_an_assigned_dense_weight_has_no_gradient_yet() -> None:
    model = compressed()
    model(X).sum().backward()
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    assert model[0]._parameters["weight"].grad is None
    with pytest.raises(CompressionError, match="cannot take the memory of another tensor"):
        model[0].weight.set_(torch.zeros(32, 12))


def test_a_state_dict_is_loaded_where_torch_swaps_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, other = compressed(), compressed()
    samo.remap_(other, samo.masks(model))
    opt = samo.AdamW(model.parameters())
    step(model, opt, X)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(X), other(X))
    step(model, opt, X)
    assert not torch.equal(model(X), other(X))


# Silent limits: docs/limits.md -------------------------------------------------------------------


def test_values_lag_behind_a_write_to_the_weight_until_anybody_looks() -> None:
    model = compressed()
    values = model.get_parameter("0.weight")
    before = values.detach().clone()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(values, before)  # in silence
    assert model[0].weight is not None
    assert torch.equal(values, 2 * before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_tool_that_asks_for_the_exact_class_passes_over_compressed_modules() -> None:
    model = compressed()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert isinstance(quantised[0], nn.Linear)  # in silence
    plain = samo.decompress_(compressed())
    quantised = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(quantised[0], nn.Linear)


def test_a_dense_tensor_put_into_the_dictionary_of_parameters_is_taken_as_it_is() -> None:
    """As `torch.func.functional_call` does it; nothing tells them apart: see docs/limits.md."""
    model = compressed()
    model[0]._parameters["weight"] = nn.Parameter(torch.ones(32, 12))
    assert (model[0].weight == 1).all()


def test_autocast_casts_a_weight_anew_at_each_of_its_uses_in_one_pass() -> None:
    for dtype, copies in ((torch.float32, 3), (torch.bfloat16, 1)):
        model = nn.Sequential(nn.Linear(64, 64))
        samo.compress_(model, samo.prune(model, 0.5), dtype=dtype)
        with torch.autocast("cpu"), saved_for_backward() as saved:
            model(model(model(torch.randn(2, 64, requires_grad=True))))
        assert len({t.data_ptr() for t in saved if t.numel() == 64 * 64}) == copies


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_functional_call_expands_values_of_another_mask_with_its_own(weights: Any) -> None:
    """See docs/limits.md. Dense weights are taken as they are."""
    model, other = compressed(weights=weights), compressed(weights=weights)
    before = model(X)
    params, _ = torch.func.stack_module_state([model, other])
    given = {name: stacked[1] for name, stacked in params.items()}
    found = torch.func.functional_call(model, given, (X,))
    mixed = samo.compress_(samo.decompress_(copy.deepcopy(model)), masks_of(model))
    for name, values in mixed.named_parameters():
        values.data = given[name].data
    assert torch.equal(found, mixed(X))
    assert not torch.equal(found, other(X))
    dense = samo.dense_state_dict(other)
    assert torch.equal(torch.func.functional_call(model, dense, (X,)), other(X))
    with pytest.raises(samo.CompressionError, match=r"'0.weight' takes 192 values or a"):
        torch.func.functional_call(model, {"0.weight": torch.ones(7)}, (X,))
    assert torch.equal(model(X), before)  # nothing stays behind


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_backward_to_the_weight_leaves_no_gradient(weights: Any) -> None:
    """See docs/limits.md."""
    model = compressed(weights=weights)
    model(X).sum().backward(inputs=[model[0].weight])
    assert model[0].weight.grad is None
    model(X).sum().backward(inputs=[model.get_parameter("0.weight")])
    assert model[0].weight.grad is not None


def test_state_of_another_mask_of_the_same_length_is_taken() -> None:
    """See docs/limits.md."""
    model = compressed()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, opt, X)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    saved = copy.deepcopy(opt.state_dict())
    masks = samo.prune(model, 0.5, method="random")
    samo.remap_(model, masks, opt)
    averaged.update_parameters(model)  # in silence
    opt.load_state_dict(saved)
    assert not torch.equal(kept(averaged.module), kept(model))
    samo.remap_(averaged.module, masks)
    assert torch.equal(kept(averaged.module), kept(model))
