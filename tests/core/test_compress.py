"""compress_ and decompress_: what a model is afterwards, and what is refused."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import samo
from samo.core.compress import masks as masks_of
from samo.core.modules import named_weights
from tests.core.twins import X, compressed, mlp, pruned_entries
from tests.meters import LiveBytes, SmallResNet, small_gpt, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_are_fp32_or_wider_and_the_weight_has_the_compute_type(dtype: torch.dtype) -> None:
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    assert samo.compress_(model, samo.prune(model, 0.5), dtype=dtype) is model
    assert [name for name, _ in model.named_parameters()] == names
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {param.dtype for param in model.parameters()} == {wide}
    assert {param.grad_dtype for param in model.parameters()} == {wide}
    assert model[0].weight.dtype == model[0].bias.dtype == dtype
    assert model[0].weight.shape == (32, 12)
    assert not pruned_entries(model).any()


def test_without_a_dtype_each_parameter_computes_in_its_own() -> None:
    model = mlp()
    model[2].to(torch.bfloat16)
    samo.compress_(model, samo.prune(model, 0.5))
    assert [model[0].weight.dtype, model[2].weight.dtype] == [torch.float32, torch.bfloat16]
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_a_model_without_parameters_is_compressed_too() -> None:
    assert isinstance(samo.compress_(nn.ReLU(), samo.Masks({})), nn.ReLU)  # a stage of a pipeline


def test_dense_copies_take_memory_after_the_dense_parameters_have_left_it() -> None:
    with LiveBytes() as meter:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        masks = samo.prune(model, 0.9)
        dense_bytes = sum(param.nbytes for param in model.parameters())
        meter.peak_bytes = 0
        samo.compress_(model, masks, dtype=torch.bfloat16)
    assert dense_bytes < meter.peak_bytes < 1.3 * dense_bytes  # values take 0.1, the copies 0.5


def test_buffers_and_batch_norms_keep_their_type() -> None:
    model = SmallResNet()
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    assert model.conv1.weight.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in model.bn1.buffers()} == {torch.float32, torch.int64}
    assert model.bn1.weight.dtype == torch.float32
    model(torch.randn(4, 3, 8, 8).bfloat16()).float().sum().backward()


# The way back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_decompressed_model_is_the_ordinary_one_again(dtype: torch.dtype | None) -> None:
    model = mlp()
    model[2].bias.requires_grad_(False)
    masks = samo.prune(model, 0.5)
    plain = copy.deepcopy(model)
    masks.apply_(plain)
    samo.compress_(model, masks, dtype=dtype)
    model(X.to(dtype or torch.float32))
    assert samo.decompress_(model) is model
    assert [type(module) for module in model.modules()] == [
        type(module) for module in plain.modules()
    ]
    assert "_samo_weights" not in vars(model[0])
    assert not model._forward_pre_hooks
    assert list(model.state_dict()) == list(plain.state_dict())
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert type(ours) is nn.Parameter
        assert ours.requires_grad == theirs.requires_grad
        # A frozen bias was only cast, and so has bf16 digits.
        assert torch.equal(ours, theirs if theirs.requires_grad or not dtype else theirs.bfloat16())
    samo.compress_(model, masks)  # and again


def test_ties_and_recurrent_layers_come_back() -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "rnn": nn.LSTM(6, 6)})
    model["b"].weight = model["a"].weight
    x = torch.randn(4, 2, 6)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    matrices["b.weight"] = matrices.pop("a.weight")  # its other name
    keep = {name: samo.Mask.from_bool(torch.rand(p.shape) < 0.5) for name, p in matrices.items()}
    samo.compress_(model, samo.Masks(keep))
    assert masks_of(model)["a.weight"] == keep["b.weight"]
    expected = model["rnn"](x)[0]
    samo.decompress_(model)
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["rnn"](x)[0], expected)
    opt = torch.optim.SGD(model["rnn"].parameters(), lr=0.5)
    model["rnn"](x)[0].sum().backward()
    opt.step()
    assert not torch.equal(model["rnn"](x)[0], expected)


# What is refused --------------------------------------------------------------------------------


def refuse(
    model: nn.Module, masks: Any, message: str, error: type[Exception] = ValueError, **options: Any
) -> None:
    """Check that compress_ raises an error and leaves the model as it was."""

    def look() -> list[Any]:
        params = [(id(param), param._version) for param in model.parameters()]
        return [*params, *map(type, model.modules())]

    before = look()
    with pytest.raises(error, match=message):
        samo.compress_(model, masks, **options)
    assert look() == before


def test_masks_that_do_not_fit_are_refused() -> None:
    other = nn.Sequential(nn.Linear(12, 32), nn.Linear(32, 6))
    refuse(mlp(), samo.prune(other, 0.5), "1 of 2 masks name no parameter", samo.MaskError)
    refuse(mlp(), {}, "masks must be samo.Masks, got dict", TypeError)
    none = samo.Masks({"0.weight": samo.Mask.from_bool(torch.zeros(32, 12) > 0)})
    refuse(mlp(), none, "mask of '0.weight' keeps none of its 384 weights", samo.MaskError)
    model = mlp()
    torch_prune.l1_unstructured(model[0], "weight", amount=0.5)
    refuse(model, samo.Masks({}), "call torch.nn.utils.prune.remove", samo.MaskError)
    torch_prune.remove(model[0], "weight")
    samo.compress_(model, samo.Masks.from_zeros(model))
    assert masks_of(model)["0.weight"].kept == 192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, r"dtype must be one of None, torch.bfloat16, .*got torch.int8"),
        ({"grad_dtype": torch.float16}, "grad_dtype must be one of"),
        ({"value_dtype": torch.float16}, "value_dtype must be one of"),
        ({"value_dtype": torch.bfloat16}, "needs dtype=torch.bfloat16"),
        ({"kernels": "fast"}, "kernels must be one of"),
        *(({"weights": bad}, "weights must be 'resident', 's") for bad in (True, -1, "lazy", 1.5)),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp()
    refuse(model, samo.prune(model, 0.5), message, **options)


def test_modules_that_cannot_be_compressed_are_refused() -> None:
    none = samo.Masks({})
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got"):
        samo.compress_(mlp().state_dict(), none)  # type: ignore[arg-type]
    refuse(nn.Sequential(nn.LazyLinear(4)), none, "uninitialized parameter")
    refuse(compressed(), none, r"compressed already \(see '0.weight'", samo.CompressionError)
    embedding = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0))
    refuse(embedding, none, r"embedding '0' has max_norm=1.0, which rewrites weights")
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    masks = samo.prune(model, 0.5)  # of the first: the second would need values of its own for bf16
    scripted = "'1' is a scripted module; compress the model"
    refuse(model, masks, scripted, samo.CompressionError, dtype=torch.bfloat16)
    model = mlp()
    model[2].register_buffer("weight_bitmap", torch.ones(3))
    named = "a Linear has 'weight_bitmap', the name"
    refuse(model, samo.prune(model, 0.5), named, samo.CompressionError)


def test_parameters_that_cannot_be_compressed_are_refused() -> None:
    for bad, what in (
        (float("nan"), "1 weights that are NaN"),
        (1e6, r"a weight of 1e\+06, which"),
    ):
        model = mlp()
        masks = samo.prune(model, 0.5)
        with torch.no_grad():
            model[2].weight[0, 0] = bad
        refuse(model, masks, f"'2.weight' has {what}", dtype=torch.float16)
    model = mlp()
    model.register_parameter("codes", nn.Parameter(torch.arange(4), requires_grad=False))
    keep = samo.Mask.from_bool(torch.tensor([True, False, True, True]))
    refuse(model, samo.Masks({"codes": keep}), "parameter 'codes' is torch.int64; pass")
    samo.compress_(model, samo.prune(model, 0.5))  # leaves integers alone
    assert "codes" not in dict(named_weights(model))
    model, none = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), samo.Masks({})
    narrow = torch.ones(4, 4).to(torch.float8_e4m3fn)
    one, two = torch.randn(8, 4).chunk(2)
    row = torch.randn(1, 4).expand(4, 4)
    for first, second, message in (
        (narrow, row, "'0.weight' is torch.float8_e4m3fn; pass dtype"),
        (one, two, "'1.weight' is a view that shares its memory with '0.weight'"),
        (one, row, "'1.weight' is a view that repeats its entries"),
    ):
        for layer, weight in zip(model, (first, second)):
            layer.weight = nn.Parameter(weight, requires_grad=False)
        refuse(model, none, message)
    owner = compressed()
    model[0].weight = owner.get_parameter("0.weight")
    belongs = "'0.weight' belongs to another compressed model"
    refuse(model, none, belongs, samo.CompressionError)


def test_a_tensor_of_another_shape_is_refused() -> None:
    model = compressed()
    for new in (nn.Parameter(torch.ones(8, 12)), torch.ones(8, 12)):
        with pytest.raises((samo.CompressionError, TypeError), match=r"\(32, 12\)|cannot assign"):
            model[0].weight = new
    with pytest.raises(samo.CompressionError, match=r"'0.weight' is \(32, 12\) and cannot be"):
        model[0].weight.data = torch.ones(8, 12)


def test_masks_of_a_damaged_or_other_state_dict_are_refused() -> None:
    state = compressed().state_dict()
    with pytest.raises(samo.MaskError, match="does not fit the model"):
        samo.masks(nn.Sequential(nn.Linear(4, 4)), state)
    state["0.weight_bitmap"][0] ^= 1
    with pytest.raises(samo.MaskError, match=r"'0.weight' is damaged"):
        samo.masks(mlp(), state)


@pytest.mark.parametrize("make", [torch.optim.SGD, samo.AdamW], ids=["torch", "samo"])
@pytest.mark.parametrize("change", ["compress_", "decompress_"])
def test_an_optimizer_built_before_the_parameters_changed_is_refused(
    change: str, make: Any
) -> None:
    """It would train the biases, which are the same parameters still, and no weight."""
    model = mlp() if change == "compress_" else compressed()
    opt = make(model.parameters(), lr=0.1)
    model(X).sum().backward()
    if change == "compress_":
        samo.compress_(model, samo.prune(model, 0.5))
    else:
        samo.decompress_(model)
    opt.zero_grad(set_to_none=False)
    model(X).sum().backward()
    with pytest.raises(samo.CompressionError, match=rf"built before {change}.* '0.weight' no"):
        opt.step()


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_pass_on_the_meta_device_has_shapes_alone(weights: Any) -> None:
    model = compressed(weights=weights).to("meta")
    out = model(X.to("meta"))
    out.sum().backward()
    assert out.shape == (len(X), 6)
    for param in model.parameters():
        assert param.grad is not None
        assert param.grad.shape == param.shape


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["compressed", "dense"])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_model_on_the_meta_device_is_filled_later(
    weights: Any, is_dense: bool, assign: bool
) -> None:
    model = mlp()
    masks = samo.prune(model, 0.5)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "weights": weights}
    with torch.device("meta"):
        empty = mlp()
    samo.compress_(empty, masks, **options)
    assert {param.device.type for param in empty.parameters()} == {"meta"}
    empty = copy.deepcopy(empty)
    samo.compress_(model, masks, **options)
    assert [param.shape for param in empty.parameters()] == [p.shape for p in model.parameters()]
    if not assign:
        empty.to_empty(device="cpu")
    saved = samo.dense_state_dict(model) if is_dense else model.state_dict()
    assert not any(empty.load_state_dict(saved, assign=assign))
    x = torch.randn(3, 12, dtype=torch.bfloat16)
    assert torch.equal(empty(x), model(x))
    (empty(x).float().sum() + model(x).float().sum()).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(empty.parameters(), model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_parameters_stay_tied_when_they_get_memory(dtype: torch.dtype) -> None:
    model = small_gpt(is_tied=True)
    masks = samo.prune(model, 0.5)
    with torch.device("meta"):
        empty = small_gpt(is_tied=True)
    saved = samo.compress_(model, masks, dtype=dtype).state_dict()
    samo.compress_(empty, masks, dtype=dtype).to_empty(device="cpu").load_state_dict(saved)
    assert len(list(empty.parameters())) == len(list(model.parameters()))
    tokens_BT = tokens()
    assert torch.equal(empty(tokens_BT), model(tokens_BT))
