"""compress_: what the model is afterwards, and what happens to it when people do what people do."""

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune as torch_prune

import samo
from samo.owners import owned_weights
from tests.meters import SmallResNet


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))


def compressed(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    model = small()
    samo.compress_(model, samo.prune(model, 0.5), dtype=dtype, **options)
    return model


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(5, 12, dtype=dtype)).float().square().mean().backward()
        opt.step()


def pruned_entries(model: nn.Module) -> Tensor:
    return torch.cat(
        [
            weight.param.detach()[~weight.mask.to_bool()]
            for weight in owned_weights(model).values()
            if weight.mask is not None
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_model_stays_the_module_it_was(dtype: torch.dtype) -> None:
    model = small()
    parameters = dict(model.named_parameters())
    printed = repr(model)
    returned = samo.compress_(model, samo.prune(model, 0.5), dtype=dtype)
    assert returned is model
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "Sequential"
    assert repr(model) == printed
    assert dict(model.named_parameters()) == parameters  # the same objects
    assert all(param.dtype == dtype for param in model.parameters())
    assert not pruned_entries(model).any()


def test_without_a_dtype_each_parameter_keeps_its_own() -> None:
    model = small()
    model[2].to(torch.bfloat16)
    samo.compress_(model, samo.prune(model, 0.5))
    assert [param.dtype for param in model.parameters()] == [torch.float32] * 2 + [
        torch.bfloat16
    ] * 2


def test_an_fp32_model_becomes_the_exact_master_of_its_bf16_weights() -> None:
    model = small()
    masks = samo.prune(model, 0.5)
    expected = model[0].weight.detach()[masks["0.weight"].to_bool()]
    samo.compress_(model, masks, dtype=torch.bfloat16)
    opt = torch.optim.SGD(samo.parameters(model), lr=0.0)
    seen: list[Tensor] = []
    opt.register_step_pre_hook(
        lambda *_: seen.append(next(samo.parameters(model)).detach().clone())
    )
    train(model, opt, steps=1)
    # torch's global hooks run before an optimizer's own, so the leaf is lent already.
    assert torch.equal(seen[0], expected)


def test_eval_and_no_grad_compute_with_the_same_weights() -> None:
    model = compressed()
    x = torch.randn(3, 12)
    trained = model(x)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), trained)
        assert isinstance(model[0].weight, nn.Parameter)
    with torch.inference_mode():
        assert torch.equal(model(x), trained)


def test_buffers_and_batch_norms_keep_their_dtype() -> None:
    model = SmallResNet()
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    assert model.conv1.weight.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in model.bn1.buffers()} == {torch.float32, torch.int64}
    assert model.bn1.weight.dtype == torch.float32


def test_state_dict_shows_the_trained_weights_under_the_usual_names() -> None:
    model = compressed()
    before = copy.deepcopy(dict(model.state_dict()))
    train(model, samo.AdamW(samo.parameters(model), lr=0.1))
    after = model.state_dict()
    assert list(after) == list(small().state_dict())
    assert all(not torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_load_state_dict_is_followed(assign: bool, dtype: torch.dtype) -> None:
    model, other = compressed(dtype), small()
    samo.compress_(other, samo.Masks({n: w.mask for n, w in owned_weights(model).items() if w.mask}),
                   dtype=dtype)  # fmt: skip
    parameters = list(model.parameters())
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert all(a is b for a, b in zip(model.parameters(), parameters))
    opt = torch.optim.SGD(samo.parameters(model), lr=0.0)
    x = torch.randn(5, 12, dtype=dtype)
    model(x).float().sum().backward()
    opt.step()  # writes the master back, which must be that of the loaded weights
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_loading_a_dense_checkpoint_keeps_the_mask_and_says_so() -> None:
    model = compressed()
    with pytest.warns(UserWarning, match="96 values other than 0 were written to pruned entries"):
        model.load_state_dict(small().state_dict())
    assert not pruned_entries(model).any()


def test_an_edit_in_place_is_followed() -> None:
    model = compressed(torch.bfloat16)
    opt = samo.AdamW(samo.parameters(model), lr=0.0, weight_decay=0.0)
    train(model, opt)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        halved = model[0].weight.clone()
    train(model, opt)
    assert torch.equal(model[0].weight, halved)


def test_an_edit_of_pruned_entries_is_undone_with_a_warning() -> None:
    model = compressed()
    nn.init.ones_(model[0].weight)
    with pytest.warns(UserWarning, match="pruned entries of '0.weight'"):
        model(torch.randn(1, 12))
    assert not pruned_entries(model).any()


def test_model_zero_grad_clears_compressed_gradients() -> None:
    model = compressed()
    model(torch.randn(1, 12)).sum().backward()
    model.zero_grad(set_to_none=False)
    grads = [leaf.grad for leaf in samo.parameters(model)]
    assert all(grad is not None and not grad.any() for grad in grads)
    model.zero_grad()
    assert all(leaf.grad is None for leaf in samo.parameters(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_copy_trains_on_its_own(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = compressed(dtype)
    train(model, samo.AdamW(samo.parameters(model), lr=0.1))
    twin = copy.deepcopy(model)
    before = copy.deepcopy(dict(model.state_dict()))
    opt = samo.AdamW(samo.parameters(twin), lr=0.1)
    train(twin, opt)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert not torch.equal(value, twin.state_dict()[name])
    assert not pruned_entries(twin).any()
    twin[0].weight.grad = None
    (twin(torch.zeros(1, 12, dtype=dtype)).sum() + twin[0].weight.sum()).backward()
    assert twin[0].weight.grad is None  # taken by the copy's own hook


def test_a_part_of_a_compressed_model_is_compressed() -> None:
    model = compressed()
    assert [name for name, _ in samo.named_parameters(model[2])] == ["weight", "bias"]


def test_memory_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model = compressed()
        opt = samo.AdamW(samo.parameters(model))
        train(model, opt)
        watched = [weakref.ref(weight) for weight in owned_weights(model).values()]
        del model, opt
        assert [ref() for ref in watched] == [None] * 4
    finally:
        gc.enable()


def test_channels_last_convolutions_train() -> None:
    model = SmallResNet()
    masks = samo.prune(model, 0.5)
    twin = copy.deepcopy(model)
    samo.compress_(model, masks)
    samo.compress_(twin, masks)
    twin.to(memory_format=torch.channels_last)
    assert twin.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8)
    for net, batch in ((model, x), (twin, x.to(memory_format=torch.channels_last))):
        opt = samo.AdamW(samo.parameters(net), lr=0.01)
        for _ in range(3):
            opt.zero_grad()
            net(batch).square().mean().backward()
            opt.step()
    assert twin.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert not pruned_entries(twin).any()


def test_to_a_device_moves_everything() -> None:
    model = compressed(torch.bfloat16)
    model(torch.randn(1, 12, dtype=torch.bfloat16)).float().sum().backward()
    model.to("cpu")
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    assert all(leaf.grad is not None for leaf in samo.parameters(model))
    train(model, opt)


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_another_dtype_is_refused_and_nothing_is_lost(cast: str) -> None:
    model = compressed()
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(samo.CompressionError, match=r"'0.weight' is compressed as float32 and can"):
        getattr(model, cast)()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_parameter_that_changed_its_dtype_is_refused() -> None:
    model = compressed()
    model[0].weight.data = model[0].weight.data.half()
    with pytest.raises(
        samo.CompressionError,
        match=r"'0.weight' was compressed as 16x12 float32 and is now 16x12 f",
    ):
        model(torch.randn(1, 12))


def test_a_parameter_that_changed_its_shape_is_refused_by_the_optimizer_too() -> None:
    model = compressed()
    opt = samo.AdamW(samo.parameters(model))
    model(torch.randn(1, 12)).sum().backward()
    model[0].weight.data = model[0].weight.data[:8]
    with pytest.raises(samo.CompressionError, match="is now 8x12 float32"):
        opt.step()


def test_a_replaced_parameter_is_refused() -> None:
    model = compressed()
    model[0].weight = nn.Parameter(torch.randn(16, 12))
    with pytest.raises(samo.CompressionError, match=r"'0.weight' was replaced after compress_"):
        model(torch.randn(1, 12))


def test_a_parametrization_put_on_later_is_refused() -> None:
    model = compressed()
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(samo.CompressionError, match="was replaced after compress_"):
        model(torch.randn(1, 12))


def test_a_second_compression_is_refused() -> None:
    model = compressed()
    with pytest.raises(
        samo.CompressionError, match=r"compressed already \(its parameter '0.weight'"
    ):
        samo.compress_(model, samo.prune(model, 0.9))


def test_a_parameter_shared_with_another_compressed_model_is_refused() -> None:
    model = compressed()
    other = small()
    other[0].weight = model[0].weight
    with pytest.raises(samo.CompressionError, match=r"'0.weight' belongs to another compressed"):
        samo.compress_(other, samo.prune(other, 0.5))


def test_an_optimizer_on_the_dense_parameters_is_refused() -> None:
    model = compressed()
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 12)).sum().backward()
    with pytest.raises(samo.CompressionError, match=r"build it on samo.parameters\(model\)"):
        opt.step()


def test_ddp_around_a_compressed_model_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(compressed()))
        with pytest.raises(samo.CompressionError, match="DistributedDataParallel cannot wrap"):
            wrapped(torch.randn(1, 12))
    finally:
        torch.distributed.destroy_process_group()


def test_pickling_a_compressed_model_is_refused_and_its_state_dict_is_not() -> None:
    model = compressed()
    with pytest.raises(samo.CompressionError, match=r"cannot be pickled; save it with samo.save"):
        pickle.dumps(model[0])
    assert pickle.dumps(model.state_dict())


def test_masks_of_another_model_are_refused() -> None:
    masks = samo.prune(nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 12)), 0.5)
    with pytest.raises(samo.MaskError, match="1 of 2 masks name no parameter"):
        samo.compress_(small(), masks)
    wider = samo.prune(nn.Sequential(nn.Linear(12, 20)), 0.5)
    with pytest.raises(samo.MaskError, match=r"'0.weight' has shape \(20, 12\) but the parameter"):
        samo.compress_(small(), wider)


def test_masks_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match=r"masks must be samo.Masks, got dict"):
        samo.compress_(small(), {})  # type: ignore[arg-type]


def test_a_mask_that_keeps_nothing_is_refused() -> None:
    masks = samo.Masks({"0.weight": samo.Mask.from_bool(torch.zeros(16, 12, dtype=torch.bool))})
    with pytest.raises(samo.MaskError, match=r"mask of '0.weight' keeps none of its 192 weights"):
        samo.compress_(small(), masks)


def test_different_masks_for_one_tied_parameter_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    keep = torch.zeros(4, 4, dtype=torch.bool)
    keep[0, 0] = True
    one, other = samo.Mask.from_bool(keep), samo.Mask.from_bool(keep.T.flip(0))
    with pytest.raises(samo.MaskError, match=r"'a.weight' and 'b.weight' are one tied parameter"):
        samo.compress_(model, samo.Masks({"a.weight": one, "b.weight": other}))
    samo.compress_(model, samo.Masks({"b.weight": one}))
    assert [name for name, _ in samo.named_parameters(model)] == ["a.weight", "a.bias", "b.bias"]
    assert owned_weights(model)["a.weight"].mask == one


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    model = small()
    masks = samo.prune(model, 0.5)
    with torch.no_grad():
        model[2].bias[3] = bad
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(ValueError, match=r"'2.bias' has 1 weights that are NaN or infinite"):
        samo.compress_(model, masks)
    assert all(
        torch.equal(before[name], value) or name == "2.bias"
        for name, value in model.state_dict().items()
    )


def test_weights_too_large_for_the_dtype_are_refused() -> None:
    model = small()
    masks = samo.prune(model, 0.5)
    with torch.no_grad():
        model[0].weight[0, 0] = 1e6
    with pytest.raises(
        ValueError, match=r"'0.weight' has a weight of 1e\+06, which float16 cannot"
    ):
        samo.compress_(model, masks, dtype=torch.float16)


def test_a_model_with_masks_of_torch_prune_is_refused_until_they_are_removed() -> None:
    model = small()
    torch_prune.l1_unstructured(model[0], "weight", amount=0.5)
    masks = samo.Masks.from_torch_prune(model)
    with pytest.raises(samo.MaskError, match=r"call torch.nn.utils.prune.remove"):
        samo.compress_(model, masks)
    torch_prune.remove(model[0], "weight")
    samo.compress_(model, masks)
    assert owned_weights(model)["0.weight"].kept == 96


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": torch.int8},
            r"dtype must be one of torch.bfloat16, .*float64, got torch.int8",
        ),
        ({"grad_dtype": torch.float16}, "grad_dtype must be bfloat16, float32 or float64"),
        ({"weights": "lazy"}, "weights must be 'resident', got 'lazy'"),
        ({"kernels": "fast"}, "kernels must be one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    model = small()
    with pytest.raises(ValueError, match=message):
        samo.compress_(model, samo.prune(model, 0.5), **options)


def test_what_is_no_module_is_refused() -> None:
    model = small()
    with pytest.raises(TypeError, match=r"compress_ takes a torch.nn.Module"):
        samo.compress_(model.state_dict(), samo.prune(model, 0.5))  # type: ignore[arg-type]


def test_parameters_without_values_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"parameter '1.weight' has no values yet"):
        samo.compress_(model, samo.Masks({}))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no values yet"):
        samo.compress_(model, samo.Masks({}))


def test_integer_parameters_are_left_alone_or_refused() -> None:
    model = small()
    model.register_parameter("codes", nn.Parameter(torch.arange(4), requires_grad=False))
    masks = samo.Masks({"codes": samo.Mask.from_bool(torch.tensor([True, False, True, True]))})
    with pytest.raises(ValueError, match=r"parameter 'codes' is int64; only floating-point"):
        samo.compress_(model, masks)
    samo.compress_(model, samo.prune(model, 0.5))
    assert "codes" not in dict(samo.named_parameters(model))


def test_exotic_float_parameters_need_a_dtype() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"parameter 'weight' is float8_e4m3fn; pass dtype"):
        samo.compress_(model, samo.Masks({}))


def test_leaves_need_a_compressed_model() -> None:
    for call in (samo.named_parameters, samo.parameters):
        with pytest.raises(
            samo.CompressionError, match=r"the model is not compressed; call samo.c"
        ):
            next(iter(call(small())))


def test_a_parameter_added_later_is_reported() -> None:
    model = compressed()
    model.append(nn.Linear(3, 3))
    with pytest.raises(samo.CompressionError, match=r"parameter '3.weight' was added to the model"):
        list(samo.parameters(model))


def test_leaves_read_nan_between_steps_and_refuse_to_be_written() -> None:
    model = compressed()
    leaf = next(samo.parameters(model))
    assert leaf.isnan().all()
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        leaf.detach().mul_(2)


@pytest.mark.parametrize("view", ["chunks", "expanded"])
def test_parameters_that_are_views_are_refused_before_any_change(view: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})
    masks = samo.prune(model, 0.5)
    if view == "chunks":
        both = torch.randn(8, 4)
        model["q"].weight, model["k"].weight = map(nn.Parameter, both.chunk(2))
        message = r"'k.weight' is a view that shares its memory with 'q.weight'"
    else:
        model["q"].weight = nn.Parameter(torch.randn(1, 4).expand(4, 4))
        message = r"'q.weight' is a view that repeats its entries"
    before = model["a"].weight.clone()
    with pytest.raises(ValueError, match=message):
        samo.compress_(model, masks)
    assert torch.equal(model["a"].weight, before)


def test_parameters_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = small()
    with pytest.raises(ValueError, match=r"'0.weight' was made under torch.inference_mode"):
        samo.compress_(model, samo.Masks({}))


def test_an_embedding_that_renormalises_itself_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"embedding '0' has max_norm=1.0, which rewrites weights"):
        samo.compress_(model, samo.prune(model, 0.5))


def test_hooks_on_a_parameter_see_its_gradient() -> None:
    model = compressed()
    model[0].weight.register_hook(torch.zeros_like)
    model(torch.randn(3, 12)).sum().backward()
    grads = {name: leaf.grad for name, leaf in samo.named_parameters(model)}
    assert grads["0.weight"] is not None
    assert not grads["0.weight"].any()
    assert grads["2.weight"] is not None
    assert grads["2.weight"].any()


def test_a_gradient_somebody_holds_is_not_written_over() -> None:
    model = compressed()
    x = torch.randn(3, 12)
    model(x).sum().backward()
    first = [leaf.grad for leaf in samo.parameters(model)]
    copies = [grad.clone() for grad in first if grad is not None]
    model.zero_grad()
    model(2 * x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(first, copies))


def test_a_gradient_set_by_hand_moves_and_is_copied_along() -> None:
    model = compressed(torch.bfloat16)
    model(torch.randn(3, 12, dtype=torch.bfloat16)).float().sum().backward()
    for leaf in samo.parameters(model):
        assert leaf.grad is not None
        leaf.grad = leaf.grad * 10
    expected = [leaf.grad.clone() for leaf in samo.parameters(model) if leaf.grad is not None]
    twin = copy.deepcopy(model)
    model.to("cpu")
    for net in (model, twin):
        assert all(
            torch.equal(leaf.grad, grad) for leaf, grad in zip(samo.parameters(net), expected)
        )


def test_an_edit_before_a_move_and_one_by_assignment_of_data_are_followed() -> None:
    model = compressed(torch.float16)
    with torch.no_grad():
        model[0].bias.fill_(3.0)
    model.to("cpu")
    model[2].bias.data = torch.full((12,), 5.0, dtype=torch.float16)
    opt = torch.optim.SGD(samo.parameters(model), lr=0.0)
    train(model, opt, steps=1)
    assert (model[0].bias == 3).all()
    assert (model[2].bias == 5).all()


def test_an_interrupted_forward_pass_leaves_a_usable_model() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = Interrupted()
    samo.compress_(model, samo.Masks({}))
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(1, 4))
    assert [name for name, _ in samo.named_parameters(model)] == ["weight"]
    assert isinstance(model.weight, nn.Parameter)


def test_transforms_of_torch_func_run() -> None:
    model = compressed()
    x = torch.randn(5, 12)
    assert torch.allclose(torch.func.vmap(model)(x), model(x), atol=1e-6)


def test_a_gradient_type_without_effect_is_refused() -> None:
    model = small()
    with pytest.raises(
        ValueError, match=r"grad_dtype=torch.bfloat16 has no effect on weights of flo"
    ):
        samo.compress_(model, samo.prune(model, 0.5), grad_dtype=torch.bfloat16)


def test_parameters_that_are_no_plain_tensors_are_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.distributed.fsdp.fully_shard(small())
        with pytest.raises(ValueError, match=r"'0.weight' is a DTensor, not a plain tensor"):
            samo.compress_(model, samo.Masks({}))
    finally:
        torch.distributed.destroy_process_group()
