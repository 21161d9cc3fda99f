"""What went wrong with modules whose parameters are replaced: classes, names, writes, copies, states."""

import copy
import io
import pickle
import subprocess
import sys
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
from samo.core.weight import weight_of
from tests.core.twins import (
    assert_equal,
    batches,
    compressed,
    loss_of,
    mlp,
    pruned_entries,
    step,
    twins,
    worst,
)
from tests.meters import ignores_dynamo

X = torch.linspace(-1, 1, 36).view(3, 12)


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
    assert type(one) is type(two)


def test_a_pickle_and_torch_save_of_the_model_go_on_training_exactly() -> None:
    model = compressed(torch.bfloat16, grad_dtype=torch.bfloat16)
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
        values = [param.grad_dtype for param in copied.parameters()]
        assert values == [torch.bfloat16, torch.float32] * 2  # weights and biases
        assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), twin.parameters()))
        assert type(copied[0]) is type(model[0])


def test_another_process_loads_a_saved_model(tmp_path: Path) -> None:
    model = compressed()
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False);"
        "x = torch.linspace(-1, 1, 36).view(3, 12); loss = model(x).square().sum(); loss.backward();"
        "print(loss.item(), [tuple(p.grad.shape) for p in model.parameters()])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loss = model(X).square().sum().item()
    assert out.split()[0] == str(loss)
    assert "[(192,), (32,), (96,), (6,)]" in out


class Registered(nn.Module):
    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if key in Registered.known:
            raise ValueError(f"{key} is registered twice")
        Registered.known[key] = cls


class Net(Registered, key="net"):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.scale


def test_a_registry_of_subclasses_is_left_alone() -> None:
    model = Net()
    before = dict(Registered.known)
    samo.compress_(model, samo.prune(model, 0.5, skip=()))
    assert Registered.known == before
    model(torch.ones(1, 8)).sum().backward()


def test_a_scripted_child_is_refused_and_the_model_left_as_it_was() -> None:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), scripted)
    before = copy.deepcopy(dict(model.state_dict()))
    identities = [id(param) for param in model.parameters()]
    masks = samo.prune(model, 0.5)  # of the first: the second would need values of its own for bf16
    with pytest.raises(samo.CompressionError, match="before it is scripted, traced or wrapped"):
        samo.compress_(model, masks, dtype=torch.bfloat16)
    assert type(model[0]) is nn.Linear
    assert [id(param) for param in model.parameters()] == identities
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(TypeError, match="compressed before it is scripted"):
        samo.compress_(scripted, samo.Masks({}))


# Identity ---------------------------------------------------------------------------------------


def test_a_parameter_is_one_object_under_all_its_ways() -> None:
    model = compressed()
    values = dict(model.named_parameters())["0.weight"]
    assert model.get_parameter("0.weight") is values
    assert model[0].get_parameter("weight") is values
    assert next(model.parameters()) is values
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight is model[0].weight
    assert values.shape == (192,)
    assert model[0].weight.shape == (32, 12)


@pytest.mark.parametrize("named", ["first", "second"])
def test_a_mask_that_names_one_of_two_tied_names_keeps_them_tied(named: str) -> None:
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)})
    model["second"].weight = model["first"].weight
    mask = samo.prune(model, 0.5)["first.weight"]
    samo.compress_(model, samo.Masks({f"{named}.weight": mask}))
    assert model["first"].weight is model["second"].weight
    assert model.get_parameter("first.weight") is model.get_parameter("second.weight")
    names = [name for name, _ in model.named_parameters()]
    assert names == ["first.weight", "first.bias", "second.bias"]
    model["second"](model["first"](torch.ones(1, 6))).sum().backward()
    copied = copy.deepcopy(model)
    assert copied["first"].weight is copied["second"].weight
    assert len(set(samo.dense_state_dict(model))) == 4


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=12, resid_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=24,
        vocab_size=40, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_a_language_model_ties_its_weights_again(build: Callable[[], Any]) -> None:
    model = build()
    embedding = next(name for name, param in model.named_parameters() if param.shape == (40, 16))
    masks = {name: samo.Mask.from_bool(param > 0) for name, param in model.named_parameters()
             if param.dim() == 2}  # fmt: skip
    samo.compress_(model, samo.Masks(masks))
    model.tie_weights()
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is inputs.weight
    assert head._parameters["weight"] is model.get_parameter(embedding)
    ids = torch.arange(10)[None]
    model(ids, labels=ids).loss.backward()
    assert model.get_parameter(embedding).grad.shape == (masks[embedding].kept,)


def test_resizing_an_embedding_grows_a_dense_one_and_the_rest_stays_compressed() -> None:
    model = tiny_gpt2()
    samo.compress_(model, samo.prune(model, 0.5))
    old = model.get_input_embeddings().weight.detach().clone()
    with warnings.catch_warnings(action="ignore"):
        model.resize_token_embeddings(44, mean_resizing=False)
    assert torch.equal(model.get_input_embeddings().weight[:40], old)
    ids = torch.arange(10)[None] + 33
    model(ids, labels=ids).loss.backward()
    assert all(
        param.grad.shape == param.shape for param in model.parameters() if param.grad is not None
    )
    assert model.get_input_embeddings().weight.shape == (44, 16)


def test_resizing_a_pruned_embedding_is_refused() -> None:
    model = tiny_gpt2()
    weight = model.transformer.wte.weight
    samo.compress_(model, samo.Masks({"transformer.wte.weight": samo.Mask.from_bool(weight > 0)}))
    with pytest.raises(
        samo.CompressionError, match=r"cannot be given \(44, 16\); .* samo.decompress_"
    ):
        model.resize_token_embeddings(44, mean_resizing=False)


def test_a_part_of_a_compressed_model_is_compressed() -> None:
    model = compressed()
    assert [name for name, _ in named_weights(model[0])] == ["weight"]
    with pytest.raises(
        samo.CompressionError, match=r"compressed already \(its parameter '0.weight'"
    ):
        samo.compress_(model, samo.Masks({}))


def test_a_parameter_of_another_compressed_model_is_refused() -> None:
    other = mlp()
    model = compressed()
    del other[0].weight
    other[0].register_parameter("weight", model.get_parameter("0.weight"))
    with pytest.raises(samo.CompressionError, match=r"'0.weight' belongs to another compressed"):
        samo.compress_(other, samo.Masks({}))


# Writes -----------------------------------------------------------------------------------------


def init_(model: nn.Module, new: Tensor) -> None:
    nn.init.constant_(model[0].weight, 0.5)
    new.fill_(0.5)


def in_place(model: nn.Module, new: Tensor) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)
    new.mul_(2)


def one_row(model: nn.Module, new: Tensor) -> None:
    with torch.no_grad():
        model[0].weight[3] = 0.25
    new[3] = 0.25


def data_in_place(model: nn.Module, new: Tensor) -> None:
    model[0].weight.data.mul_(2)
    new.mul_(2)


def data_add(model: nn.Module, new: Tensor) -> None:
    """What peft does to merge an adapter."""
    delta = torch.full_like(new, 0.125)
    model[0].weight.data += delta
    new.add_(delta)


def data_assigned(model: nn.Module, new: Tensor) -> None:
    model[0].weight.data = torch.full_like(new, 0.75)
    new.fill_(0.75)


def assigned(model: nn.Module, new: Tensor) -> None:
    model[0].weight = nn.Parameter(torch.full_like(new, 0.375))
    new.fill_(0.375)


def copied_into(model: nn.Module, new: Tensor) -> None:
    with torch.no_grad():
        model[0].weight.copy_(torch.full_like(new, 3.0))
    new.fill_(3.0)


def peft_merge(model: nn.Module, new: Tensor) -> None:
    """peft's unsafe and safe merge, one after the other."""
    base = model[0]
    with torch.no_grad():
        base.weight.data += torch.full_like(new, 0.25)
        merged = base.weight.data.clone()
        merged += torch.full_like(new, 0.5)
        base.weight.data = merged
    new.add_(0.75)


def values_in_place(model: nn.Module, new: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
    new.mul_(2)


def values_assigned(model: nn.Module, new: Tensor) -> None:
    values = model.get_parameter("0.weight")
    values.data = torch.full_like(values, 0.5)
    new.fill_(0.5)


def vector(model: nn.Module, new: Tensor) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 2, model.parameters())
    new.mul_(2)


def foreach(model: nn.Module, new: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)
    new.mul_(2)


WRITES = [
    init_, in_place, one_row, data_in_place, data_add, data_assigned, assigned, copied_into,
    peft_merge, values_in_place, values_assigned, vector, foreach,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("then", ["forward", "step", "state_dict", "copy", "to", "no_grad"])
@pytest.mark.filterwarnings("ignore:.*values other than 0 were written to pruned entries")
def test_a_write_reaches_the_values_and_the_dense_weight(
    write: Callable[[nn.Module, Tensor], None], then: str
) -> None:
    model = compressed()
    model(X).sum().backward()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    keep = kept(model)
    new = model[0].weight.detach().clone()
    write(model, new)
    expected = new.where(keep, 0)
    if then == "forward":
        assert torch.equal(model[0](X), nn.functional.linear(X, expected, model[0].bias))
    elif then == "no_grad":
        with torch.no_grad():
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
    assert torch.equal(model[0].weight, expected)
    assert torch.equal(model.get_parameter("0.weight"), expected[keep])


def test_a_write_to_pruned_entries_is_undone_with_one_warning() -> None:
    model = compressed()
    nn.init.ones_(model[0].weight)
    with pytest.warns(UserWarning, match="192 values other than 0 .* pruned entries of '0.weight'"):
        model(X)
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


def test_swapping_in_averaged_weights_and_back_loses_no_digits() -> None:
    """Averages for an evaluation, then the own weights: moves of 2e-5 a step are not lost."""
    ends = []
    for swaps in (False, True):
        torch.manual_seed(0)
        model = compressed(torch.bfloat16)
        opt = samo.AdamW(model.parameters(), lr=2e-5, kernels="reference")
        for x in batches(50, dtype=torch.bfloat16):
            step(model, opt, x)
            if swaps:
                own = [param.detach().clone() for param in model.parameters()]
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.5)
                    model(x)
                    for param, value in zip(model.parameters(), own):
                        param.copy_(value)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_dense_gradient_is_read_and_written_through_the_weight() -> None:
    model, dense = twins(mlp())
    for net in (model, dense):
        loss_of(net, torch.ones(2, 12)).backward()
    assert torch.equal(model[0].weight.grad, dense[0].weight.grad)
    model[0].weight.grad = torch.ones(32, 12)
    assert torch.equal(model.get_parameter("0.weight").grad, torch.ones(38))
    model[0].weight.grad = None
    assert model.get_parameter("0.weight").grad is None


@pytest.mark.parametrize("how", ["method", "attribute", "module"])
def test_a_weight_is_frozen_and_trained_again(how: str) -> None:
    model = compressed(torch.bfloat16)
    opt = samo.AdamW(model.parameters(), lr=0.1)

    def set_(value: bool) -> None:
        if how == "method":
            model[0].weight.requires_grad_(value)
        elif how == "attribute":
            model[0].weight.requires_grad = value
        else:
            model[0].requires_grad_(value)

    set_(False)
    assert not model.get_parameter("0.weight").requires_grad
    assert not model[0].weight.requires_grad
    before = model[0].weight.detach().clone()
    step(model, opt, X.bfloat16())
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    set_(True)
    step(model, opt, X.bfloat16())
    assert not torch.equal(model[0].weight, before)


def test_unused_and_frozen_weights_get_no_gradient_and_stay_as_they_are() -> None:
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("used", "frozen", "unused")})
    model["frozen"].requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    before = samo.dense_state_dict(model)
    opt = samo.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(2, 6, dtype=torch.bfloat16)
    model["frozen"](model["used"](x)).float().sum().backward()
    opt.step()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == name.startswith("used")
        same = torch.equal(before[name], samo.dense_state_dict(model)[name])
        assert same == (not name.startswith("used"))


def test_a_deleted_weight_is_gone_and_can_be_replaced() -> None:
    model = compressed()
    del model[0].weight
    assert not hasattr(model[0], "weight")
    assert "0.weight" not in dict(model.named_parameters())
    assert "0.weight" not in model.state_dict()
    model[0].weight = nn.Parameter(torch.ones(32, 12))
    assert type(model[0].weight) is nn.Parameter
    model(X).sum().backward()
    assert model[0].weight.grad.shape == (32, 12)
    assert [name for name, _ in named_weights(model)] == ["2.weight"]
    assert type(samo.decompress_(copy.deepcopy(model))[0]) is nn.Linear


def test_none_instead_of_a_weight_is_taken() -> None:
    model = compressed()
    model[2].weight = None  # type: ignore[assignment]
    assert model[2].weight is None
    assert "2.weight" not in dict(model.named_parameters())


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


class ZeroLike(torch.optim.SGD):
    """Writes as ZeroRedundancyOptimizer does when it spreads what a rank has updated."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.copy_(param.data - group["lr"] * param.grad)


OPTIMIZERS: list[Any] = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adafactor,
    samo.AdamW, ZeroLike,
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_dense_weight_is_fresh_after_a_step(make: Any, dtype: torch.dtype) -> None:
    model = compressed(dtype)
    opt = make(model.parameters(), lr=0.05)
    for x in batches(3, dtype=dtype):
        step(model, opt, x)
        held = model[0].weight.detach()
        values = model.get_parameter("0.weight")
        assert torch.equal(held[kept(model)], values.to(dtype))
        assert not held[~kept(model)].any()


def test_values_written_through_data_are_seen_after_the_next_step_or_load() -> None:
    """The one write that torch has no sign of: see docs/limits.md."""
    model = compressed()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    before = model[0].weight.detach().clone()
    model.get_parameter("0.weight").data.mul_(2)
    assert torch.equal(model[0].weight, before)  # in silence
    model(X).sum().backward()
    opt.step()
    assert torch.equal(model[0].weight, 2 * before)
    model.get_parameter("0.weight").data.mul_(2)
    model.load_state_dict(model.state_dict())
    assert torch.equal(model[0].weight, 4 * before)


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


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_loaded_state_is_computed_with(assign: bool, dtype: torch.dtype) -> None:
    model = compressed(dtype)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(3)
    model(X.to(dtype)).float().sum().backward()
    model.zero_grad()
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert torch.equal(model(X.to(dtype)), other(X.to(dtype)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    step(model, opt, X.to(dtype))
    assert not torch.equal(model[0].weight, before)
    assert weight_of(model.get_parameter("0.weight")) is not None


def test_assigned_values_of_another_type_keep_training() -> None:
    """bf16 values of a lean model into an exact one, as torch allows with assign=True."""
    model = compressed(torch.bfloat16)
    state = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X.bfloat16())
    assert torch.equal(model[0].weight[kept(model)], model.get_parameter("0.weight").bfloat16())


# _apply -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.half(), torch.float16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.to(torch.bfloat16), torch.bfloat16),
        (lambda model: model.half().float(), torch.float32),
    ],
    ids=["half", "bfloat16", "double", "to", "half-float"],
)
def test_a_cast_changes_the_compute_type_and_never_the_values(
    cast: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    model = compressed()
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


@pytest.mark.parametrize("flag", ["overwrite", "swap"])
def test_a_cast_under_the_flags_of_torch_future(flag: str) -> None:
    get = getattr(torch.__future__, f"get_{flag}_module_params_on_conversion")
    set_ = getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")
    before = get()
    model = compressed()
    expected = model.get_parameter("0.weight").detach().clone()
    set_(True)
    try:
        model.to(torch.bfloat16)
        model.to("cpu")
    finally:
        set_(before)
    assert torch.equal(model.get_parameter("0.weight"), expected)
    assert model[0].weight.dtype == torch.bfloat16
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X.bfloat16())
    assert not torch.equal(model.get_parameter("0.weight"), expected)
    assert torch.equal(model[0].weight[kept(model)], model.get_parameter("0.weight").bfloat16())


def test_an_empty_copy_is_filled_by_a_state_dict() -> None:
    model = compressed()
    state = copy.deepcopy(model.state_dict())
    expected = model(X)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert torch.equal(model(X), expected)


def test_a_model_on_the_meta_device_is_filled_by_assignment() -> None:
    model = compressed()
    state = copy.deepcopy(model.state_dict())
    expected = model(X)
    model.to("meta")
    assert model[0].weight.is_meta
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(X), expected)


def test_shared_memory_holds_the_values() -> None:
    model = compressed()
    expected = model(X)
    model.share_memory()
    assert model.get_parameter("0.weight").is_shared()
    assert torch.equal(model(X), expected)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
    assert not torch.equal(model(X), expected)


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


def test_a_state_dict_has_the_names_of_before_and_bitmaps() -> None:
    model = compressed()
    state = model.state_dict()
    assert set(state) == {*mlp().state_dict(), f"0.weight{BITMAP}", f"2.weight{BITMAP}"}
    assert state["0.weight"].shape == (192,)
    assert state[f"0.weight{BITMAP}"].dtype == torch.uint8
    assert not dict(model.named_buffers())  # DDP would send them in every pass


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.state_dict()))


def test_a_garbled_bitmap_is_refused_and_changes_nothing() -> None:
    model = compressed()
    state = state_of(model)
    state[f"0.weight{BITMAP}"][0] ^= 1
    state["0.weight"].zero_()
    before = model.get_parameter("0.weight").detach().clone()
    with pytest.raises(RuntimeError, match=r"'0.weight' comes with a damaged bitmap"):
        model.load_state_dict(state)
    assert torch.equal(model.get_parameter("0.weight"), before)


def test_the_state_of_another_mask_is_refused() -> None:
    model = compressed()
    torch.manual_seed(1)
    other = state_of(compressed())
    with pytest.raises(
        RuntimeError, match=r"'0.weight' was saved with another mask, .*samo.remap_"
    ):
        model.load_state_dict(other)
    with pytest.raises(RuntimeError, match="bitmap of another size or type"):
        model.load_state_dict(state_of(model) | {f"0.weight{BITMAP}": torch.zeros(5).byte()})


def test_a_missing_bitmap_is_a_missing_key() -> None:
    model = compressed()
    state = state_of(model)
    del state[f"2.weight{BITMAP}"]
    with pytest.raises(RuntimeError, match=f'Missing key.*"2.weight{BITMAP}"'):
        model.load_state_dict(state)
    assert not model.load_state_dict(state, strict=False).unexpected_keys


def test_a_dense_state_dict_is_taken_with_one_warning() -> None:
    model, dense = compressed(), mlp()
    with pytest.warns(UserWarning, match="pruned entries") as caught:
        model.load_state_dict(dense.state_dict())
    assert len(caught) == 1
    assert (
        "288 values other than 0 were written to pruned entries of '0.weight' and 1 other"
        in str(caught[0].message)
    )
    assert caught[0].filename == __file__
    masks = masks_of(model)
    masks.apply_(dense)
    assert_equal(model, dense)
    with warnings.catch_warnings(action="error"):
        model.load_state_dict(dense.state_dict())  # zeros where pruned: nothing to say


def test_an_average_over_state_dicts_is_loaded() -> None:
    """Bitmaps are whole numbers: an average of two equal ones, in floats and back, is the same."""
    model = compressed()
    first = state_of(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
    second = state_of(model)
    average = {
        name: (0.5 * first[name].float() + 0.5 * second[name].float()).to(first[name].dtype)
        for name in first
    }
    model.load_state_dict(average)
    expected = (first["0.weight"] + second["0.weight"]) / 2
    torch.testing.assert_close(model.get_parameter("0.weight").detach(), expected)


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
    assert [names[param] for param in exempt["params"]] == [
        "0.weight", "1.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    assert exempt["weight_decay"] == 0.0
    with pytest.raises(ValueError, match="no_decay pattern 'embed' matches no parameter"):
        samo.param_groups(model, weight_decay=0.1, no_decay=["embed"])


def test_pruned_weights_learn_faster_by_the_power_of_their_density() -> None:
    """Under gradients of ones the first step of Adam is the rate itself."""
    model = nn.Sequential(nn.Linear(16, 16))
    samo.compress_(model, samo.prune(model, 0.75))
    groups = samo.param_groups(model, lr=0.01, density_power=-0.5)
    before = samo.dense_state_dict(model)
    opt = torch.optim.AdamW(groups)
    (model[0].weight.sum() + model[0].bias.sum()).backward()
    opt.step()
    after = samo.dense_state_dict(model)
    change = (before["0.weight"] - after["0.weight"])[kept(model)]
    torch.testing.assert_close(change, torch.full_like(change, 0.02), rtol=1e-4, atol=1e-6)
    change = before["0.bias"] - after["0.bias"]
    torch.testing.assert_close(change, torch.full_like(change, 0.01), rtol=1e-4, atol=1e-6)
    for wrong in (float("nan"), -4, "much"):
        with pytest.raises(ValueError, match="density_power must be a number from -3 to 3"):
            samo.param_groups(model, lr=0.1, density_power=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give lr= here, not to the optimizer"):
        samo.param_groups(model, density_power=-1)


# Copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_copy_of_the_model_trains_on_its_own(dtype: torch.dtype) -> None:
    model = compressed(dtype, grad_dtype=torch.bfloat16 if dtype == torch.bfloat16 else None)
    model(X.to(dtype)).float().sum().backward()
    twin = copy.deepcopy(model)
    assert [p.grad_dtype for p in twin.parameters()] == [p.grad_dtype for p in model.parameters()]
    before = state_of(model)
    step(twin, samo.AdamW(twin.parameters(), lr=0.1), X.to(dtype))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(twin[0].weight, model[0].weight)


@pytest.mark.parametrize("make", [torch.optim.AdamW, samo.AdamW], ids=["torch", "samo"])
def test_a_model_and_its_optimizer_copied_together_go_on_together(make: Any) -> None:
    model = compressed(torch.bfloat16)
    opt = make(model.parameters(), lr=0.1)
    step(model, opt, X.bfloat16())
    twin, twin_opt = copy.deepcopy((model, opt))
    for _ in range(2):
        step(model, opt, X.bfloat16())
    for _ in range(2):
        step(twin, twin_opt, X.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert torch.equal(model[0].weight, twin[0].weight)


@pytest.mark.parametrize("make", [torch.optim.AdamW, samo.AdamW], ids=["torch", "samo"])
def test_an_optimizer_copied_alone_updates_copies_as_torch_does(make: Any) -> None:
    """Its parameters are copies that belong to no model, as with any model of torch."""
    model = compressed()
    opt = make(model.parameters(), lr=0.1)
    step(model, opt, X)
    alone = copy.deepcopy(opt)
    before = model[0].weight.detach().clone()
    for param in alone.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    first = alone.param_groups[0]["params"][0].detach().clone()
    alone.step()
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(alone.param_groups[0]["params"][0], first)


def test_memory_is_freed_without_the_garbage_collector() -> None:
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        model = compressed()
        opt = samo.AdamW(model.parameters())
        step(model, opt, X)
        watched = [weakref.ref(weight.dense) for _, weight in named_weights(model)]
        watched += [weakref.ref(weight) for _, weight in named_weights(model)]
        del model, opt
        assert [ref() for ref in watched] == [None] * 4
    finally:
        gc.enable()


# Parametrizations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
    ids=["weight_norm", "spectral_norm", "orthogonal"],
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
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_older_norms_train_as_masked_dense(wrap: Any) -> None:
    nets = []
    keep = torch.rand(12, 12) < 0.5
    for _ in range(2):  # torch cannot copy a module with the older weight_norm
        torch.manual_seed(0)
        nets.append(nn.Sequential(wrap(nn.Linear(12, 12)), nn.Tanh(), nn.Linear(12, 6)).double())
    model, dense = nets
    name = "weight_v" if wrap is nn.utils.weight_norm else "weight_orig"
    samo.compress_(model, samo.Masks({f"0.{name}": samo.Mask.from_bool(keep)}))
    source = getattr(dense[0], name)
    source.data.mul_(keep)
    source.register_hook(lambda grad: grad.where(keep, 0))
    opts = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for x in batches(10, dtype=torch.float64):
        for net, opt in zip(nets, opts):
            step(net, opt, x)
    assert worst(model, dense) < 1e-9


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (
            lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()),
            "non-leaf Tensor",
        ),
        (lambda m: nn.utils.prune.l1_unstructured(m, "weight", amount=0.5), "non-leaf Tensor"),
        (nn.utils.weight_norm, "put weight_norm or spectral_norm on before compress_"),
        (lambda m: nn.utils.spectral_norm(m)(X), "must be|shape|size"),  # of the 1-D values
    ],
    ids=["parametrize", "prune", "weight_norm", "spectral_norm"],
)
def test_what_would_train_the_weight_without_its_mask_is_refused(wrap: Any, message: str) -> None:
    model = compressed()
    with pytest.raises((ValueError, RuntimeError, IndexError), match=message):
        wrap(model[0])


def test_a_dense_parameter_registered_in_place_of_a_weight_keeps_the_mask() -> None:
    model = compressed()
    with pytest.warns(UserWarning, match="192 values other than 0"):
        model[0].register_parameter("weight", nn.Parameter(torch.ones(32, 12)))
    assert torch.equal(model[0].weight, kept(model).float())
    assert model.get_parameter("0.weight").shape == (192,)


def test_a_tensor_takes_the_place_of_a_deleted_weight() -> None:
    model = compressed()
    del model[0].weight
    model[0].weight = torch.ones(32, 12)
    assert torch.equal(model[0](X), nn.functional.linear(X, torch.ones(32, 12), model[0].bias))


def test_a_dense_tensor_put_into_the_dictionary_of_parameters_is_taken_as_it_is() -> None:
    """As `torch.func.functional_call` puts it there; nothing tells the two apart: see docs/limits.md."""
    model = compressed()
    model[0]._parameters["weight"] = nn.Parameter(torch.ones(32, 12))
    assert (model[0].weight == 1).all()


# What goes wrong in silence, or would ------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.SGD, samo.AdamW], ids=["torch", "samo"])
def test_an_optimizer_built_before_compress_is_refused(make: Any) -> None:
    """It would train the biases, which are the same parameters still, and no weight."""
    model = mlp()
    opt = make(model.parameters(), lr=0.1)
    samo.compress_(model, samo.prune(model, 0.5))
    loss_of(model, X).backward()
    with pytest.raises(samo.CompressionError, match=r"built before compress_ .* '0.weight' was"):
        opt.step()


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


def test_decay_by_the_number_of_dimensions_takes_values_for_biases() -> None:
    model = compressed()
    assert [name for name, param in model.named_parameters() if param.dim() >= 2] == []
    decayed = {
        id(param)
        for group in samo.param_groups(model, weight_decay=0.1)
        if group["weight_decay"]
        for param in group["params"]
    }
    assert decayed == {id(model.get_parameter(name)) for name in ("0.weight", "2.weight")}
