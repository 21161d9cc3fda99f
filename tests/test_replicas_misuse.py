"""What would make replicas drift apart works, or raises on every rank."""

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from samo.owners import owned_weights
from tests.ranks import run_ranks


def compressed(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8), nn.BatchNorm1d(8))
    masks = samo.prune(model, 0.5, method="random")
    return samo.compress_(model, masks, dtype=dtype)


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    dtype = model[0].weight.dtype
    out = model[2](model[1](model[0](torch.ones(3, 16, dtype=dtype))))
    return out.float().square().mean() * factor


def equal_on_all_ranks(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(values, value)
        assert all(torch.equal(value, other) for other in values), name


# What must be the same at the start


def differ(rank: int, num_ranks: int) -> None:
    data = samo.mesh()["data"]
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))
    masks = dict(samo.prune(model, 0.5))
    if rank == 2:
        masks["1.weight"] = samo.prune(model, 0.25)["1.weight"]
    samo.compress_(model, samo.Masks(masks))
    with pytest.raises(
        samo.MaskError, match=r"the mask of '1.weight' on rank 2 is not that of rank 0"
    ):
        samo.replicate(model, data)
    model = compressed()
    with pytest.raises(
        samo.CompressionError, match=r"'shard' is state on rank 1 and None on rank 0"
    ):
        samo.replicate(model, data, shard="state" if rank == 1 else None)
    model[0].bias.requires_grad_(rank == 1)
    with pytest.raises(samo.CompressionError, match=r"'0.bias' is trained .* on rank 1 and frozen"):
        samo.replicate(model, data)

    model = compressed(seed=rank)  # values and buffers are given to all
    model[3].running_mean.add_(rank)
    replicas = samo.replicate(model, data)
    equal_on_all_ranks(model)
    assert not model[3].running_mean.any()

    weight = owned_weights(model)["0.weight"]  # as after a change of masks
    weight.mask = weight.mask ^ weight.mask if rank == 1 else weight.mask
    with pytest.raises(samo.MaskError, match=r"the mask of '0.weight' on rank 1"):
        replicas.rebuild()
    if rank == 1:
        with pytest.raises(
            samo.CompressionError, match=r"'0.weight' keeps 0 weights, but 192 when"
        ):
            loss_of(model).backward()


def change_masks(rank: int, num_ranks: int) -> None:
    data = samo.mesh()["data"]
    model = compressed()
    replicas = samo.replicate(model, data)
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    other = samo.prune(model, 0.5, method="random", seed=1)
    assert other.kept == samo.prune(model, 0.5, method="random").kept
    samo.remap_(model, other, opt)
    with pytest.raises(samo.CompressionError, match=r"another mask than when .* call rebuild\(\)"):
        loss_of(model).backward()
    model.zero_grad()
    replicas.rebuild()
    loss_of(model).backward()
    opt.step()
    equal_on_all_ranks(model)

    # masks that each rank chooses by its own gradients
    moving = samo.DynamicSparse(model, opt, grow="gradient", every=1, stop=9, add_up=lambda g: g)
    opt.zero_grad()
    model[2](model[0](torch.eye(16)[rank::2])).square().mean().backward()
    opt.step()
    moving.step()
    with pytest.raises(samo.CompressionError, match=r"another mask than when"):
        loss_of(model).backward()
    with pytest.raises(samo.MaskError, match=r"the mask of '.\.weight' on rank 1 is not that of"):
        replicas.rebuild()

    model = compressed()
    replicas = samo.replicate(model, data, shard="state")
    opt = samo.AdamW(samo.parameters(model), lr=0.0, weight_decay=0.0)
    loss_of(model).backward()
    opt.step()
    opt.zero_grad()
    before = model[0].weight.detach().clone()
    with pytest.raises(samo.CompressionError, match=r"sharded over ranks .* call release\(\)"):
        samo.remap_(model, other, opt)
    assert torch.equal(model[0].weight, before)
    replicas.release()
    samo.remap_(model, other)
    replicas.rebuild()
    after = model[0].weight.detach().clone()
    opt = samo.AdamW(samo.parameters(model), lr=0.0, weight_decay=0.0)
    loss_of(model).backward()
    opt.step()
    assert torch.equal(model[0].weight, after)
    equal_on_all_ranks(model)


def test_masks_that_change_on_ranks_are_compared_before_the_next_gradient() -> None:
    run_ranks(2, change_masks)


def reductions_of(replicas: samo.Replicas) -> list[str]:
    """Return a list that grows by what is reduced over the ranks, in order."""
    seen: list[str] = []
    group = replicas.team.group
    reduce = group.all_reduce

    def noted(tensor: Tensor, *, what: str, **options: Any) -> Any:
        seen.append(what)
        return reduce(tensor, what=what, **options)

    vars(group)["all_reduce"] = noted
    return seen


def grow_together(rank: int, num_ranks: int) -> None:
    """Masks grow by the gradients of all ranks, as in one process that has seen the whole batch."""
    data = samo.mesh()["data"]
    x = torch.randn(num_ranks, 4, 16, generator=torch.Generator().manual_seed(5))
    alone, model, by_hand = compressed(), compressed(), compressed()
    replicas = samo.replicate(model, data, bucket_bytes=400)
    sums: dict[str, Any] = {"add_up": dist.all_reduce}
    seen = reductions_of(replicas)
    moved = []
    for each, parts, options in (
        (alone, x, {}),
        (model, x[rank : rank + 1], {}),
        (by_hand, x[rank : rank + 1], sums),
    ):
        opt = samo.AdamW(samo.parameters(each), lr=0.0, weight_decay=0.0)
        moving = samo.DynamicSparse(
            each, opt, grow="gradient", every=2, stop=9, candidates=None, **options
        )
        for _ in range(2):
            seen.clear()
            opt.zero_grad()
            for part in parts:
                each[2](each[1](each[0](part))).square().mean().backward()
            opt.step()
            masks = moving.step()
        if (
            each is model
        ):  # buckets could start in the middle of the second pass, but wait for all sums
            is_sum = ["by which entries grow" in what for what in seen]
            assert is_sum == [True] * 2 + [False] * (len(replicas.team.buckets) + 1), seen
        moved.append(masks)
    assert moved[0] is not None
    assert moved[0] == moved[1] == moved[2]
    replicas.rebuild()
    loss_of(model).backward()
    equal_on_all_ranks(model)


def test_replicas_grow_entries_by_the_gradients_of_all_ranks() -> None:
    run_ranks(2, grow_together)


def test_differences_are_named_and_values_made_equal() -> None:
    run_ranks(3, differ)


# Steps


def step_badly(rank: int, num_ranks: int) -> None:
    data = samo.mesh()["data"]
    for shard in (None, "state"):
        skip_together(rank, data, shard)
        use_wrongly(data, shard)
        edit_weights(data, shard)
    clip_wrongly(data)
    change_what_is_trained(data)
    be_interrupted(data)
    come_again(data)
    carry_moments_over(data)
    count_steps_of_entries(data)
    use_whole_tensors(data)
    train_after_release(data)
    edit_what_others_update(data)


def train_after_release(data: Any) -> None:
    for shard in (None, "state"):
        model = compressed()
        replicas = samo.replicate(model, data, shard=shard)
        replicas.release()
        with pytest.raises(samo.CompressionError, match=r"'\d.\w+' was released, so its gradient"):
            loss_of(model).backward()
        replicas.rebuild()
        loss_of(model).backward()
        replicas.release()
        again = samo.replicate(model, data)  # another way than before
        loss_of(model, dist.get_rank()).backward()
        opt = torch.optim.SGD(samo.parameters(model), lr=0.1)
        opt.step()
        equal_on_all_ranks(model)
        again.release(is_final=True)
        opt.zero_grad()
        loss_of(model, dist.get_rank()).backward()
        opt.step()
        with pytest.raises(AssertionError, match="weight"):
            equal_on_all_ranks(model)
        dist.barrier()


def use_whole_tensors(data: Any) -> None:
    for shard in (None, "state"):
        model = compressed()
        samo.replicate(model, data, shard=shard)
        opt = torch.optim.Adafactor(samo.parameters(model))
        loss_of(model).backward()
        if shard is None:
            opt.step()
            equal_on_all_ranks(model)
            continue
        with pytest.raises(
            samo.CompressionError, match=r"Adafactor updates an entry of '0.weight' by"
        ):
            opt.step()


def edit_what_others_update(data: Any) -> None:
    """A step publishes whole buckets, also the weights that it does not update."""
    model = compressed()
    samo.replicate(model, data, shard="state")
    leaves = dict(samo.named_parameters(model))
    opt = torch.optim.SGD([leaves["0.weight"]], lr=0.1)
    loss_of(model).backward()
    with torch.no_grad():
        model[2].bias.fill_(7.0)
    opt.step()
    assert torch.equal(model[2].bias, torch.full((8,), 7.0))


def count_steps_of_entries(data: Any) -> None:
    model = compressed()
    samo.replicate(model, data, shard="state")
    with pytest.raises(samo.CompressionError, match=r"leave out entry_steps, or replicate with"):
        samo.AdamW(samo.parameters(model), entry_steps=True)


def skip_together(rank: int, data: Any, shard: Any) -> None:
    for make in (samo.AdamW, torch.optim.SGD):
        model = compressed(torch.float16)
        samo.replicate(model, data, shard=shard)
        scaler = samo.LossScaler(model, init_scale=64.0)
        opt = make(samo.parameters(model), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        loss = loss_of(model)
        loss = loss * torch.inf if rank == 1 else loss
        scaler.scale(loss).backward()
        opt.step()
        assert scaler.get_scale() == 32.0
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        opt.step()
        assert scaler.get_scale() == 32.0
        assert not torch.equal(model[0].weight, before["0.weight"])
        equal_on_all_ranks(model)


def use_wrongly(data: Any, shard: Any) -> None:
    model = compressed()
    early = samo.AdamW(samo.parameters(model))
    samo.replicate(model, data, shard=shard)
    with pytest.raises(samo.CompressionError, match=r"replicated already"):
        samo.replicate(model, data)
    with pytest.raises(
        samo.CompressionError, match=r"is replicated on cpu and cannot move to meta"
    ):
        model.to("meta")
    opt = samo.AdamW(samo.parameters(model))
    with samo.no_sync(model):
        loss_of(model).backward()
    with pytest.raises(samo.CompressionError, match=r"accumulated under samo.no_sync"):
        opt.step()
    model.zero_grad()
    opt.step()  # nothing to do
    loss_of(model).backward()
    with pytest.raises(samo.CompressionError, match=r"AdamW.step was given a closure"):
        opt.step(lambda: 0)
    with pytest.raises(samo.CompressionError, match=r"SGD.step was given a closure"):
        torch.optim.SGD(samo.parameters(model), lr=0.1).step(lambda: 0)
    if shard is None:
        early.step()
        assert owned_weights(copy.deepcopy(model))["0.weight"].replica is None
    else:
        with pytest.raises(
            samo.CompressionError, match=r"holds all of '0.weight', but its state is sharded"
        ):
            early.step()
        with pytest.raises(
            samo.CompressionError, match=r"has its optimizer state on several ranks"
        ):
            copy.deepcopy(model)


def edit_weights(data: Any, shard: Any) -> None:
    """What is written to weights is what the next step begins with."""
    for make in (samo.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)):
        train_and_edit(make, data, shard)


def train_and_edit(make: Any, data: Any, shard: Any) -> None:
    model, alone = compressed(torch.bfloat16), compressed(torch.bfloat16)
    samo.replicate(model, data, shard=shard)
    opt, reference = (make(samo.parameters(m), lr=0.01) for m in (model, alone))
    for step in range(4):
        for one, its in ((model, opt), (alone, reference)):
            if step == 2:
                with torch.no_grad():
                    one[0].weight.mul_(2)
            loss_of(one).backward()
            its.step()
            its.zero_grad()
    equal_on_all_ranks(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name


def clip_wrongly(data: Any) -> None:
    model = compressed()
    replicas = samo.replicate(model, data, shard="state")
    opt = samo.AdamW(samo.parameters(model))
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(samo.parameters(model), 1.0)
    with pytest.raises(samo.CompressionError, match=r"use samo.clip_grad_norm_\(model, max_norm\)"):
        opt.step()
    replicas.accept_gradients()
    opt.step()
    opt.zero_grad()
    alone = compressed()
    alone.load_state_dict(model.state_dict())
    for norm_type in (2.0, 1.0, math.inf):
        norms = []
        for one in (model, alone):
            one.zero_grad()
            loss_of(one).backward()
            norms.append(samo.clip_grad_norm_(one, 1e-3, norm_type))
        torch.testing.assert_close(*norms)
        opt.step()
        alone.load_state_dict(model.state_dict())
    model.zero_grad()
    loss_of(model, math.inf).backward()
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is nan"):
        samo.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        loss_of(model).backward()
        grads = [leaf.grad for leaf in samo.parameters(model) if leaf.grad is not None]
        if dist.get_rank() == rank:
            next(grad for grad in grads if grad.numel())[0] = math.nan
        assert not samo.clip_grad_norm_(model, 1.0, math.inf).isfinite()  # on no rank
        assert all(grad.isnan().all() for grad in grads)
    model.zero_grad()


def change_what_is_trained(data: Any) -> None:
    model = compressed(torch.bfloat16)
    model[0].bias.requires_grad_(False)
    replicas = samo.replicate(model, data, shard="state")
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    loss_of(model).backward()
    opt.step()
    model[0].bias.requires_grad_(True)
    with pytest.raises(
        samo.CompressionError, match=r"'0.bias' was frozen when samo.replicate was called"
    ):
        loss_of(model).backward()
    model.zero_grad()
    with pytest.raises(samo.CompressionError, match=r"call release\(\) before"):
        replicas.rebuild()
    weights = owned_weights(model)
    rests = {n: w.part.rest.clone() for n, w in weights.items() if w.part.rest is not None}
    rests.pop("0.bias", None)
    assert {"0.weight", "2.weight", "2.bias"} == rests.keys()
    replicas.release()
    for name, rest in rests.items():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rest)
        assert torch.equal(weights[name].rest, torch.cat(parts)), name
    with pytest.raises(samo.CompressionError, match=r"the model is not replicated"):
        samo.traffic(model)
    replicas.rebuild()
    loss_of(model).backward()
    for orphan in (opt, torch.optim.SGD(opt.param_groups[0]["params"], lr=0.1)):
        with pytest.raises(samo.CompressionError, match="sharded anew; build an optimizer"):
            orphan.step()
    model.zero_grad()
    opt = samo.AdamW(samo.parameters(model), lr=0.1)
    before = model[0].bias.detach().clone()
    loss_of(model).backward()
    opt.step()
    assert not torch.equal(model[0].bias, before)
    equal_on_all_ranks(model)


def be_interrupted(data: Any) -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = compressed()
    samo.replicate(model, data, bucket_bytes=1)
    opt = samo.AdamW(samo.parameters(model))

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            model[2](Stop.apply(model[0](torch.ones(3, 16)))).sum().backward()

    interrupted()  # nothing was launched in the first pass
    with pytest.raises(samo.CompressionError, match=r"in a backward pass that raised"):
        opt.step()
    model.zero_grad()
    loss_of(model).backward()
    opt.step()
    equal_on_all_ranks(model)
    interrupted()
    with pytest.raises(
        samo.CompressionError, match=r"interrupted after 4 of 6 reductions over ranks had begun"
    ):
        loss_of(model)


def come_again(data: Any) -> None:
    """A gradient that nobody could announce comes after its bucket was launched."""
    model = compressed()
    samo.replicate(model, data, bucket_bytes=1)
    loss_of(model).backward()
    model.zero_grad()
    plain = (model[0].weight.square().sum() + model[2].weight.square().sum()) * 1.0
    with pytest.raises(samo.CompressionError, match=r"pass overlap=False to samo.replicate"):
        (plain.sqrt().sqrt() + loss_of(model)).backward()
    model, alone = compressed(), compressed()
    replicas = samo.replicate(model, data, bucket_bytes=1, overlap=False)
    for one in (model, alone):
        loss_of(one).backward()
        one.zero_grad()
        plain = (one[0].weight.square().sum() + one[2].weight.square().sum()) * 1.0
        (plain.sqrt().sqrt() + loss_of(one)).backward()
    for leaf, other in zip(samo.parameters(model), samo.parameters(alone)):
        assert (leaf.grad is None) == (other.grad is None)
        assert leaf.grad is None or torch.equal(leaf.grad, other.grad)
    assert len(replicas.team.buckets) == 6


def carry_moments_over(data: Any) -> None:
    """What a dense optimizer knows goes to the rank that owns it."""
    torch.manual_seed(0)
    found = []
    for state in ("exact", "lean"):
        for shard in (None, "state"):
            torch.manual_seed(0)
            model: nn.Module = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
            dense = torch.optim.AdamW(model.parameters())
            loss_of(model).backward()
            dense.step()
            samo.compress_(model, samo.prune(model, 0.5))
            samo.replicate(model, data, shard=shard)
            opt = samo.AdamW(samo.parameters(model), lr=0.1, state=state)
            opt.carry_over(dense)
            loss_of(model).backward()
            opt.step()
            found.append(model[0].weight.detach().clone())
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], found[3], rtol=0, atol=0.02)


def test_steps_that_would_go_wrong() -> None:
    run_ranks(2, step_badly)


# Settings, without other ranks


@pytest.fixture
def data() -> Iterator[Any]:
    yield samo.mesh()["data"]
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard": "weights"}, "shard must be None or 'state', got 'weights'"),
        ({"wire_dtype": torch.int8}, "wire_dtype must be None or one of"),
        ({"bucket_bytes": 0}, "bucket_bytes must be over 0, got 0"),
        ({"timeout_s": -1.0}, "timeout_s must be over 0, got -1.0"),
        ({"heartbeat_s": 0}, "heartbeat_s must be over 0, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(
    settings: dict[str, Any], message: str, data: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        samo.replicate(compressed(), data, **settings)


def test_what_is_no_axis_or_not_compressed_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match=r"mesh must be one axis of a DeviceMesh, got int"):
        samo.replicate(compressed(), 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mesh must have one axis, got \('pipe', 'data'\)"):
        samo.replicate(compressed(), samo.mesh())
    with pytest.raises(samo.CompressionError, match=r"the model is not compressed"):
        samo.replicate(nn.Linear(2, 2), data)
    with (
        pytest.raises(samo.CompressionError, match=r"the model is not replicated"),
        samo.no_sync(compressed()),
    ):
        pass
    with pytest.raises(ValueError, match=r"norm_type must be over 0, got -1"):
        samo.clip_grad_norm_(compressed(), 1.0, -1.0)
