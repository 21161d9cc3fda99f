"""FSDP2 around a compressed model: what is sharded, gathered and saved is compressed."""

import copy
import functools
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import samo
from samo.core.modules import named_weights
from tests.ranks import run_ranks

STEPS = 5
ROWS = 24
BAD = 2
"""The step with a gradient that is not finite, where there is one."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Layers inside and outside of blocks; lengths that two and four ranks do not share evenly."""

    def __init__(self, *, is_checkpointed: bool = False, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 11), nn.Linear(11, 3)
        self.blocks = nn.ModuleList([Block(11), Block(11)])
        self.again = nn.Linear(6, 11)
        self.is_again_used = True
        self.is_checkpointed = is_checkpointed
        if is_tied:
            self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * (self.again(x) if self.is_again_used else 1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.last(x)


@functools.cache
def masks(**settings: bool) -> samo.Masks:
    return samo.prune(Net(**settings), 0.7)


def build(
    *,
    weights: Any = "streamed",
    dtype: torch.dtype = torch.float64,
    is_frozen: bool = False,
    **settings: bool,
) -> Net:
    model = Net(**settings).to(dtype)
    model.blocks[0].requires_grad_(not is_frozen)
    samo.compress_(model, masks(**settings), weights=weights, kernels="reference")
    return model


def shard(model: Net, *dims: int, **settings: Any) -> Net:
    names = ("replicas", "shards")[-len(dims) :]
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 6, generator=draw, dtype=torch.float64)
    return x, torch.randn(ROWS, 3, generator=draw, dtype=torch.float64)


def part_of(rank: int, num_ranks: int) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows.chunk(num_ranks)[rank]


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    part: Callable[[Tensor], Tensor] = lambda rows: rows,
    *,
    steps: range = range(STEPS),
    num_micro_batches: int = 1,
    max_norm: float = 0.0,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[Tensor]:
    """Train on this rank's part of every batch; return the norms of the gradients."""
    norms = []
    for step in steps:
        pieces = [part(rows).chunk(num_micro_batches) for rows in batch(step)]
        for number, (x, y) in enumerate(zip(*pieces)):
            is_last = number == num_micro_batches - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                (mse_loss(model(x), y) / num_micro_batches).backward()
        if max_norm:
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        before_step(step)
        opt.step()
        opt.zero_grad()
    return norms


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def samo_adamw(model: nn.Module) -> samo.AdamW:
    return samo.AdamW(samo.param_groups(model, lr=1e-2, weight_decay=0.1))


def check_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """Compare with another order of sums alone between the two."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-12, atol=1e-12, msg=f"{what}: {name}"
        )


# Training -----------------------------------------------------------------------------------------

# How a model is built, sharded and trained in each of them.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "accumulation, kept whole": (
        {},
        {"reshard_after_forward": False},
        {"num_micro_batches": 2},
    ),
    "clipping": ({}, {}, {"max_norm": 0.1}),
    "checkpointed": ({"is_checkpointed": True}, {}, {}),
    "resident": ({"weights": "resident"}, {}, {}),
    "frozen": ({"is_frozen": True}, {}, {}),
    "tied": ({"is_tied": True}, {}, {}),
    "compiled": ({}, {}, {}),
    "samo.AdamW": ({}, {}, {}),
}


OWN = ("clipping", "frozen", "tied", "samo.AdamW")
"""Those that do something else than the plain one, in one process too."""

HYBRID = ("plain", "samo.AdamW")
"""Those that four ranks do as two replicas of two shards."""


def modes_of(num_ranks: int) -> list[str]:
    """Return what so many ranks do. Four have empty shards; compilers take their time."""
    few = (*HYBRID, "accumulation, kept whole", "clipping", "checkpointed")
    return [mode for mode in MODES if num_ranks == 2 or mode in few]


def bad_gradient(model: nn.Module, is_here: bool) -> Callable[[int], None]:
    """Put a NaN into one entry of one shard."""

    def put(step: int) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        if step == BAD and is_here:
            next(grad for grad in locals_ if grad.numel()).view(-1)[0] = float("nan")

    return put


def every_mode(rank: int, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in modes_of(num_ranks):
        building, sharding, training = MODES[mode]
        model = build(**building)
        if mode == "compiled":
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        names = [name for name, _ in model.named_parameters()]
        dims = (2, 2) if num_ranks == 4 and mode in HYBRID else (num_ranks,)
        shard(model, *dims, **sharding)
        assert [name for name, _ in model.named_parameters()] == names
        # What was whole is let go before the first pass.
        assert all(isinstance(weight.values, DTensor) for _, weight in named_weights(model))
        is_ours = mode == "samo.AdamW"
        opt = samo_adamw(model) if is_ours else torch_adamw(model)
        if is_ours:
            is_last = rank % dims[-1] == dims[-1] - 1
            training = {"before_step": bad_gradient(model, is_last)}
        norms = train(model, opt, part_of(rank, num_ranks), **training)
        found[mode] = state_of(model), norms, getattr(opt, "skipped_steps", 0)
        assert not any(weight.is_resident for _, weight in named_weights(model))
    return found


@functools.cache
def in_one_process(mode: str = "plain") -> tuple[dict[str, Tensor], list[Tensor]]:
    model = build(**MODES[mode][0])
    is_ours = mode == "samo.AdamW"
    opt = samo_adamw(model) if is_ours else torch_adamw(model)
    norms = train(
        model,
        opt,
        max_norm=MODES[mode][2].get("max_norm", 0.0),
        before_step=bad_gradient(model, is_ours),
    )
    return state_of(model), norms


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_models_train_as_one_process(num_ranks: int) -> None:
    everyones = run_ranks(num_ranks, every_mode)
    for mode in modes_of(num_ranks):
        wanted, norms = in_one_process(mode if mode in OWN else "plain")
        for rank, found in enumerate(everyones):
            state, found_norms, skipped = found[mode]
            check_close(state, wanted, f"{mode}, rank {rank}")
            torch.testing.assert_close(found_norms, norms, rtol=1e-12, atol=0)
            assert skipped == (mode == "samo.AdamW")
    start = build().state_dict()["first.weight"]
    assert not torch.equal(in_one_process()[0]["first.weight"], start)
    assert all(float(norm) > 0.1 for norm in in_one_process("clipping")[1]), "nothing was clipped"


def in_mixed_precision(rank: int, num_ranks: int) -> dict[str, Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(build(dtype=torch.float32), num_ranks, mp_policy=policy)
    opt = torch_adamw(model)
    part = part_of(rank, num_ranks)
    for step in range(STEPS):
        x, y = (part(rows).float() for rows in batch(step))
        mse_loss(model(x).float(), y).backward()
        opt.step()
        opt.zero_grad()
    return state_of(model)


def test_a_policy_of_mixed_precision_is_what_one_process_does_by_hand() -> None:
    """bfloat16 values are gathered, gradients added up in float32: bit for bit, of two ranks."""
    model = build(dtype=torch.float32)
    work = copy.deepcopy(model)
    pairs = []
    for name, param in model.named_parameters():
        path, _, key = name.rpartition(".")
        narrow = nn.Parameter(param.detach().bfloat16())
        setattr(work.get_submodule(path), key, narrow)
        pairs.append((param, narrow))
    opt = torch_adamw(model)
    for step in range(STEPS):
        with torch.no_grad():
            for param, narrow in pairs:
                narrow.copy_(param)
                param.grad = torch.zeros_like(param)
        for rank in range(2):
            x, y = (part_of(rank, 2)(rows).float() for rows in batch(step))
            mse_loss(work(x.bfloat16()).float(), y).backward()
            for param, narrow in pairs:
                assert narrow.grad is not None
                param.grad += narrow.grad.float() / 2  # type: ignore[operator]
                narrow.grad = None
        opt.step()
    for found in run_ranks(2, in_mixed_precision):
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


# Files --------------------------------------------------------------------------------------------


def save(model: nn.Module, opt: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=folder)


def on_meta(num_ranks: int) -> Net:
    """Build and shard a model without memory, and give it some that nothing is written to."""
    with torch.device("meta"):
        model = Net().double()
    samo.compress_(model, masks(), weights="streamed", kernels="reference")
    assert all(param.is_meta for param in model.parameters())
    shard(model, num_ranks)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    return model


def train_until_killed(rank: int, num_ranks: int, folder: Path, make: Any) -> None:
    model = shard(build(), num_ranks)
    opt = make(model)

    def die(step: int) -> None:
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(STEPS):
        try:
            train(
                model, opt, part_of(rank, num_ranks), steps=range(step, step + 1), before_step=die
            )
            save(model, opt, folder / str(step))
        except (RuntimeError, dcp.api.CheckpointException):
            return  # the other one is gone


def resume(rank: int, num_ranks: int, folder: Path, make: Any) -> dict[str, Tensor]:
    model = on_meta(num_ranks)
    opt = make(model)
    state = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
    dcp.load(state, checkpoint_id=folder / "2")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["opt"])
    train(model, opt, part_of(rank, num_ranks), steps=range(3, STEPS))
    return state_of(model)


@pytest.mark.parametrize("make", [torch_adamw, samo_adamw])
def test_a_killed_run_goes_on_with_other_ranks(tmp_path: Path, make: Any) -> None:
    run_ranks(2, train_until_killed, tmp_path, make, lost=[1])
    assert (tmp_path / "2" / ".metadata").exists()
    assert not (tmp_path / "3" / ".metadata").exists()
    model = build()
    train(model, make(model))
    wanted = state_of(model)
    for found in run_ranks(3, resume, tmp_path, make):
        check_close(found, wanted, "resumed")


def other_ways_in_and_out(rank: int, num_ranks: int) -> dict[str, Any]:
    """Whole state dicts, dense ones, and what is refused."""
    model = shard(build(), num_ranks)
    train(model, samo_adamw(model), part_of(rank, num_ranks), steps=range(2))
    wanted = state_of(model)
    found: dict[str, Any] = {"dense": samo.dense_state_dict(model), "states": {}}
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    for name, given, settings in (
        ("whole", full, options),
        ("dense", found["dense"], options),
        (
            "of rank 0",
            full if rank == 0 else {},
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ),
    ):
        other = on_meta(num_ranks)
        set_model_state_dict(other, dict(given), options=settings)
        found["states"][name] = state_of(other)
    for name, state in found["states"].items():
        assert list(state) == list(wanted), name
        assert all(torch.equal(state[key], value) for key, value in wanted.items()), name
    found["refused"] = []
    early = build()
    opt = torch_adamw(early)
    shard(early, num_ranks)
    for action in (
        opt.step,
        lambda: samo.decompress_(model),
        lambda: samo.remap_(model, masks()),
        lambda: samo.GradualPruning(model, opt, 0.9, start=0, stop=1, every=1),
        lambda: parallelize_module(
            build(), init_device_mesh("cpu", (num_ranks,)), {"first": ColwiseParallel()}
        ),
        lambda: samo.prune(fully_shard(nn.Linear(6, 11)), 0.5),
        lambda: samo.compress_(fully_shard(nn.Linear(6, 11)), samo.Masks({"weight": mask()})),
    ):
        with pytest.raises((samo.CompressionError, ValueError)) as error:
            action()
        found["refused"].append(str(error.value))
    draw = torch.Generator().manual_seed(rank)
    keep = torch.zeros(66, dtype=torch.bool)
    keep[torch.randperm(66, generator=draw)[:20]] = True  # as many on each rank
    alone = nn.Linear(6, 11)
    samo.compress_(
        alone, samo.Masks({"weight": samo.Mask.from_bool(keep.view(11, 6))}), weights="streamed"
    )
    fully_shard(alone)
    with pytest.raises(samo.MaskError) as error:
        alone(torch.ones(1, 6))
    found["refused"].append(str(error.value))
    return found


def mask() -> samo.Mask:
    return masks()["first.weight"]


def test_other_ways_in_and_out() -> None:
    model = build()
    train(model, samo_adamw(model), steps=range(2))
    wanted = samo.dense_state_dict(model)
    for found in run_ranks(2, other_ways_in_and_out):
        check_close(found["dense"], wanted, "dense")
        too_early, no_way_back, no_remap, no_move, no_columns, *too_late, masks_differ = found[
            "refused"
        ]
        assert "AdamW was built before decompress_ or fully_shard" in too_early
        assert "'first.weight' is sharded over 2 ranks" in no_way_back
        assert "samo.dense_state_dict(model)" in no_way_back
        assert "change them before fully_shard" in no_remap
        assert "change them before fully_shard" in no_move
        assert "'first.weight' is compressed and has no rows or columns" in no_columns
        assert all("compress the model before it is sharded" in error for error in too_late)
        assert "the mask of 'weight' is not the same on rank" in masks_differ


# What is held and sent ----------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Adds up the bytes of what is gathered and of what is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            nbytes = sum(arg.nbytes for arg in args[:2] if isinstance(arg, Tensor))
            self.gathered += nbytes * ("allgather" in name)
            self.reduced += nbytes * ("reduce_scatter" in name)
        return func(*args, **(kwargs or {}))


def pruned_layers(sparsity: float) -> tuple[nn.Sequential, samo.Masks]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    return model, samo.prune(model, sparsity)


def held_by(model: nn.Module) -> list[Tensor]:
    """Return what sharding replaces: values and resident dense weights."""
    weights = [weight for _, weight in named_weights(model)]
    return [part for w in weights for part in (w.values, w.dense) if part is not None]


def meter(rank: int, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for kind in ("dense", "compressed"):
        model, chosen = pruned_layers(0.9)
        if kind == "compressed":
            samo.compress_(model, chosen, dtype=torch.bfloat16)
        whole = [weakref.ref(part) for part in held_by(model)]
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        assert kind == "dense" or not any(part() for part in whole)
        opt = samo_adamw(model)
        with Sent() as sent:
            model(torch.ones(2, 64)).float().sum().backward()
        found[kind] = sent.gathered, sent.reduced
        opt.step()
        if kind == "compressed":
            account = samo.ledger(model, opt)
            found["pruned"] = account.pruned.measured, account.pruned.predicted
    return found


def test_ranks_hold_and_send_what_is_kept() -> None:
    everyones = run_ranks(2, meter)
    numel = 3 * 64 * 64
    kept = sum(mask.kept for mask in pruned_layers(0.9)[1].values())
    for found in everyones:
        for ours, theirs in zip(found["compressed"], found["dense"]):
            assert theirs > 0
            assert ours / theirs == pytest.approx(0.1, rel=0.02)
        measured, predicted = found["pruned"]
        assert measured == predicted
        assert measured["bitmap"] == numel / 8 + numel / 256  # whole, on each rank
        assert measured["dense"] == 0
    for kind, size in {"values": 4, "gradients": 4, "moments": 8}.items():
        assert sum(found["pruned"][0][kind] for found in everyones) == size * kept
        assert all(found["pruned"][0][kind] < 0.6 * size * kept for found in everyones)
