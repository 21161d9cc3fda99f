"""Replicas on real gloo ranks against one process with the whole batch."""

import functools
import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samo
from samo.owners import owned_weights
from tests.ranks import run_ranks

Shard = Literal["state"] | None
MODES: Final[tuple[Shard, ...]] = (None, "state")
BATCH: Final = 24


class Net(nn.Module):
    """A tied head, checkpointed blocks, a layer used twice and one never used."""

    def __init__(self, *, is_reentrant: bool = False) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.embed = nn.Embedding(17, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.twice = nn.Linear(12, 12, bias=False)
        self.unused = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.is_reentrant).tanh()
        x = self.twice(self.twice(x).tanh())
        return self.head(self.norm(x))


def compressed(seed: int = 0, dtype: torch.dtype = torch.float64, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Net(**kwargs).to(dtype if dtype == torch.float64 else torch.float32)
    return samo.compress_(model, samo.prune(model, 0.5), dtype=dtype)


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 17, (BATCH, 4), generator=torch.Generator().manual_seed(step))


def share(tokens: Tensor, rank: int, num_ranks: int) -> Tensor:
    return tokens.chunk(num_ranks)[rank]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


OPTIMIZERS: Final[dict[str, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "sgd": lambda m: torch.optim.SGD(samo.parameters(m), lr=0.1, momentum=0.9),
    "samo": lambda m: samo.AdamW(
        samo.param_groups(m, weight_decay=0.1), lr=0.01, density_power=-0.5
    ),
    "torch": lambda m: torch.optim.AdamW(samo.param_groups(m, weight_decay=0.1), lr=0.01),
}


# 50 steps as on one process


def train_together(rank: int, num_ranks: int) -> dict[tuple[str, Shard], Any]:
    """Return losses of all ranks, norms and weights, for each optimizer and mode."""
    data = samo.mesh()["data"]
    found = {}
    for make in OPTIMIZERS:
        for shard in MODES:
            model = differently_started(rank)
            # Several buckets for one of them; every further one is messages, which take the time here.
            samo.replicate(model, data, shard=shard, bucket_bytes=3000 if make == "samo" else 5e6)
            opt = OPTIMIZERS[make](model)
            losses, norms = train(model, opt, rank, num_ranks, clip=samo.clip_grad_norm_)
            dist.all_reduce(losses)
            assert samo.traffic(model).reductions == 50
            unused = owned_weights(model)["unused.weight"]
            assert not opt.state.get(unused.part.leaf), "nothing used it, as in one process"
            found[make, shard] = losses / num_ranks, norms, dict(model.state_dict())
    return found


@functools.cache
def train_alone(make: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model = compressed()
    return *train(model, OPTIMIZERS[make](model), clip=clip_as_torch), dict(model.state_dict())


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    clip: Callable[[nn.Module, float], Tensor],
) -> tuple[Tensor, Tensor]:
    """Take 50 steps, every fifth of two micro-batches, and return losses and norms of gradients."""
    losses, norms = [], []
    for step in range(50):
        tokens = share(tokens_of(step), rank, num_ranks)
        loss = torch.zeros((), dtype=torch.float64)
        if step % 5 == 4 and num_ranks > 1:
            with samo.no_sync(model):
                loss = loss_of(model, tokens[::2]) / 2
                loss.backward()
            tokens = tokens[1::2]
        last = loss_of(model, tokens) / (2 if loss else 1)
        last.backward()
        losses.append((loss + last).detach())
        norms.append(clip(model, 0.5))
        opt.step()
        opt.zero_grad()
    return torch.stack(losses), torch.stack(norms)


def clip_as_torch(model: nn.Module, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(samo.parameters(model), max_norm)


def differently_started(rank: int) -> nn.Module:
    """Return a model with the masks of all ranks and, but for rank 0, other values."""
    masks = {n: w.mask for n, w in owned_weights(compressed()).items() if w.mask is not None}
    torch.manual_seed(rank)
    return samo.compress_(Net().double(), samo.Masks(masks))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_fifty_steps_are_those_of_one_process(num_ranks: int) -> None:
    for rank, found in enumerate(run_ranks(num_ranks, train_together)):
        assert len(found) == 6
        for (make, shard), (losses, norms, state) in found.items():
            case = f"{make} shard={shard} on rank {rank}"
            expected = train_alone(make)
            torch.testing.assert_close(losses, expected[0], rtol=1e-10, atol=0, msg=case)
            torch.testing.assert_close(norms, expected[1], rtol=1e-9, atol=0, msg=case)
            assert state.keys() == expected[2].keys()
            for name, value in expected[2].items():
                off = (state[name] - value).abs().max() / value.abs().max()
                assert off <= 1e-10, f"{case}: {name} is off by {off:.2e}"


# One reduction, bit for bit


def reduce_integers(rank: int, num_ranks: int) -> None:
    """Gradients that are small integers have one right sum, whatever the order."""
    data = samo.mesh()["data"]
    for dtype in (torch.float32, torch.bfloat16):
        for shard in MODES:
            for wire in (None, torch.float32, torch.bfloat16):
                model = compressed(dtype=dtype)
                samo.replicate(
                    model, data, shard=shard, wire_dtype=wire, bucket_bytes=300, average=False
                )
                sums = {}
                loss = torch.zeros(())
                for name, weight in owned_weights(model).items():
                    drawn = [
                        torch.randint(-9, 9, weight.shape, generator=seeded(r, name)).to(dtype)
                        for r in range(num_ranks)
                    ]
                    sums[name] = kept(weight, torch.stack(drawn).sum(0))
                    loss = loss + (weight.param * drawn[rank]).sum()
                loss.backward()
                for name, weight in owned_weights(model).items():
                    found = whole_gradient(weight)
                    assert torch.equal(found, sums[name]), (name, dtype, shard, wire)


def seeded(rank: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + sum(map(ord, name)))


def kept(weight: Any, dense: Tensor) -> Tensor:
    out = torch.empty(weight.kept, dtype=dense.dtype)
    weight.kernels.compress_(dense, weight.mask, out)
    return out


def whole_gradient(weight: Any) -> Tensor:
    """Return a weight's gradient, put together from the parts of all ranks."""
    if weight.part is weight:
        return weight.leaf.grad.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, weight.part.leaf.grad)
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_integer_gradients_are_summed_bit_for_bit(num_ranks: int) -> None:
    run_ranks(num_ranks, reduce_integers)


def average_integers(rank: int, num_ranks: int) -> None:
    """The mean of integers is the exact one, rounded once, also where 16 bits do not hold their sum.

    But for that of gloo, which rounds sums of bfloat16 numbers: those are small enough here.
    """
    data = samo.mesh()["data"]
    for dtype in (torch.float32, torch.bfloat16):
        for shard in MODES:
            for wire in (torch.float32, torch.bfloat16):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(32, 32, bias=False))
                samo.compress_(model, samo.prune(model, 0.5), dtype=dtype)
                samo.replicate(model, data, shard=shard, wire_dtype=wire)
                weight = owned_weights(model)["0.weight"]
                is_summed_by_gloo = shard is None and wire == torch.bfloat16
                largest = 85 if is_summed_by_gloo else 255
                drawn = [
                    torch.randint(-largest, largest, weight.shape, generator=seeded(r, "a"))
                    for r in range(num_ranks)
                ]
                total = kept(weight, torch.stack(drawn).sum(0).double())
                assert torch.equal(total, total.bfloat16().double()) == is_summed_by_gloo
                (weight.param * drawn[rank].to(dtype)).sum().backward()
                mean = (total / num_ranks).to(wire if shard else dtype).to(dtype)
                assert torch.equal(whole_gradient(weight), mean), (dtype, shard, wire)


def test_means_are_rounded_once() -> None:
    run_ranks(3, average_integers)


# Passes of all kinds


def reference_gradients(
    model: nn.Module, losses: Callable[[nn.Module, int], Tensor]
) -> dict[str, Tensor]:
    """Return the mean of all ranks' gradients, computed in this process."""
    num_ranks = dist.get_world_size()
    for rank in range(num_ranks):
        (losses(model, rank) / num_ranks).backward()
    return {n: w.leaf.grad for n, w in owned_weights(model).items() if w.leaf.grad is not None}


def same_gradients(model: nn.Module, expected: dict[str, Tensor], factor: float = 1.0) -> None:
    for name, weight in owned_weights(model).items():
        if name in expected:
            found = whole_gradient(weight)
            torch.testing.assert_close(found, factor * expected[name], rtol=1e-12, atol=1e-15)
        else:
            assert weight.part.leaf.grad is None, f"'{name}' was used nowhere"


def partly_used(model: nn.Module, rank: int) -> Tensor:
    """Use a layer on the last rank alone."""
    x = model.embed(tokens_of(rank))
    if rank == dist.get_world_size() - 1:
        x = model.unused(x)
    return model.head(model.twice(x)).square().mean()


def nothing_to_learn(model: nn.Module, rank: int) -> Tensor:
    """Take part without a gradient of its own on the last rank."""
    return on_my_tokens(model, rank) * (rank < dist.get_world_size() - 1)


def on_my_tokens(model: nn.Module, rank: int) -> Tensor:
    return loss_of(model, tokens_of(rank))


def try_passes(rank: int, num_ranks: int) -> None:
    data = samo.mesh()["data"]
    for shard in MODES:
        for average in (True, False):
            for is_reentrant in (False, True):
                settings = {"shard": shard, "average": average, "bucket_bytes": 900}
                model = compressed(is_reentrant=is_reentrant)
                replicas = samo.replicate(model, data, **settings)
                launched = count_early_launches(replicas)
                for losses in (on_my_tokens, on_my_tokens, partly_used, nothing_to_learn):
                    expected = reference_gradients(compressed(), losses)
                    factor = 1.0 if average else num_ranks
                    model.zero_grad()
                    losses(model, rank).backward()
                    same_gradients(model, expected, factor)
                assert launched[0] == 0, "the first pass learns"
                assert launched[1] >= len(replicas.team.buckets) - 2, launched
                twice_without_clearing(model, rank, factor)
                run_a_graph_twice(model, rank, factor)
                assert samo.traffic(model).reductions == 8


def count_early_launches(replicas: samo.Replicas) -> list[int]:
    """Return a list that gets, for each pass, the buckets launched before its end."""
    team, counts = replicas.team, []
    reduce = team._reduce

    def counted() -> None:
        counts.append(team._next)
        reduce()

    team._reduce = counted  # type: ignore[method-assign]
    return counts


def twice_without_clearing(model: nn.Module, rank: int, factor: float) -> None:
    expected = reference_gradients(compressed(), on_my_tokens)
    model.zero_grad()
    for _ in range(2):
        on_my_tokens(model, rank).backward()
    same_gradients(model, expected, 2 * factor)


def run_a_graph_twice(model: nn.Module, rank: int, factor: float) -> None:
    """The uses of a retained graph are not awaited any more, and still arrive."""
    if model.is_reentrant:
        return on_my_tokens(model, rank).backward() or on_my_tokens(model, rank).backward()
    expected = reference_gradients(compressed(), on_my_tokens)
    model.zero_grad()
    loss = on_my_tokens(model, rank)
    loss.backward(retain_graph=True)
    loss.backward()
    same_gradients(model, expected, 2 * factor)


@pytest.mark.slow
def test_gradients_of_all_kinds_of_passes() -> None:
    run_ranks(3, try_passes)


# Two axes


def train_two_stages(rank: int, num_ranks: int) -> None:
    """Ranks 0 and 1 replicate one model, ranks 2 and 3 another."""
    mesh = samo.mesh(pipe=2)
    stage, replica = mesh["pipe"].get_local_rank(), mesh["data"].get_local_rank()
    assert rank == 2 * stage + replica
    torch.manual_seed(stage)
    model = nn.Sequential(nn.Linear(6 + stage, 6))
    masks = dict(samo.prune(model, 0.5))
    if rank == 3:
        model_of_rank_3 = nn.Sequential(nn.Linear(7, 6))
        masks = dict(samo.prune(model_of_rank_3, 0.25))
    samo.compress_(model, samo.Masks(masks))
    if stage == 1:
        with pytest.raises(samo.MaskError, match=r"'0.weight' on rank 3 is not that of rank 2"):
            samo.replicate(model, mesh["data"])
        return
    samo.replicate(model, mesh["data"], average=False)
    model(torch.full((1, 6), float(rank + 1))).sum().backward()
    for leaf in samo.parameters(model):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full_like(leaf.grad, 3.0 if leaf.numel() > 6 else 2.0))


def test_replicas_are_those_of_their_own_stage() -> None:
    run_ranks(4, train_two_stages)


# Types, bytes and memory


def count_bytes(rank: int, num_ranks: int) -> None:
    data = samo.mesh()["data"]
    for shard in MODES:
        for dtype, state in (
            (torch.bfloat16, "exact"),
            (torch.bfloat16, "lean"),
            (torch.float32, "exact"),
        ):
            model = wide(dtype)
            samo.replicate(model, data, shard=shard, bucket_bytes=20_000)
            opt = samo.AdamW(samo.parameters(model), lr=1e-2, state=state)
            for step in range(3):
                x = torch.randn(4, 128, generator=seeded(rank, str(step))).to(dtype)
                model(x).float().square().mean().backward()
                samo.clip_grad_norm_(model, 1.0)
                opt.step()
                opt.zero_grad()
            account = samo.ledger(model, opt)
            for part in (account.pruned, account.unpruned):
                for kind, size in part.predicted.items():
                    assert part.measured[kind] == size, (shard, dtype, state, kind)
            assert account.other_bytes < 400 + 16 * num_ranks
            found = samo.traffic(model)
            assert f"\nall{found.sent_bytes:>61,}\nreductions: 3; " in str(found)
            assert (" values " in f" {found} ".replace("\n", " ")) is (shard == "state")
            check_traffic(model, found, shard, num_ranks, steps=3)
            for value in model.state_dict().values():
                values = [torch.empty_like(value) for _ in range(num_ranks)]
                dist.all_gather(values, value)
                assert all(torch.equal(value, other) for other in values)


def wide(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128))
    return samo.compress_(model, samo.prune(model, 0.9), dtype=dtype)


def check_traffic(model: nn.Module, found: Any, shard: Shard, num_ranks: int, steps: int) -> None:
    weights = owned_weights(model).values()
    size = next(iter(weights)).dtype.itemsize
    pruned = steps * size * sum(w.kept for w in weights if w.mask is not None)
    whole = steps * size * sum(w.kept for w in weights)
    padding = steps * size * 3 * num_ranks
    assert found.reductions == steps
    assert found.gradients.pruned_bytes == pruned
    assert whole <= found.gradients.argument_bytes <= whole + padding
    share = (num_ranks - 1) / num_ranks
    if shard is None:
        assert math.isclose(found.gradients.sent_bytes, 2 * share * whole, rel_tol=1e-2)
        assert found.values.calls == found.norm.calls == 0
    else:
        assert math.isclose(found.gradients.sent_bytes, share * whole, rel_tol=1e-2)
        assert found.values.pruned_bytes == pruned
        assert math.isclose(found.values.sent_bytes, share * whole, rel_tol=1e-2)
        assert found.norm.calls == steps
    assert found.exposed_s > 0
    assert found.in_flight_s > 0
    assert found.start.sent_bytes > 0


@pytest.mark.slow
def test_bytes_held_and_sent_are_those_predicted() -> None:
    run_ranks(2, count_bytes)
    run_ranks(3, count_bytes)


def free_everything(rank: int, num_ranks: int) -> None:
    """No cycle holds a model's buffers after the model is gone."""
    data = samo.mesh()["data"]
    for shard in MODES:
        model = compressed()
        replicas = samo.replicate(model, data, shard=shard)
        opt = samo.AdamW(samo.parameters(model))
        for _ in range(2):
            loss_of(model, tokens_of(0)).backward()
            opt.step()
        buckets = [weakref.ref(bucket) for bucket in replicas.team.buckets]
        gc.collect()
        gc.disable()
        try:
            del model, replicas, opt
            assert all(bucket() is None for bucket in buckets)
            for thread in threading.enumerate():
                if thread.name == "samo-heartbeat":
                    thread.join(timeout=5)
                    assert not thread.is_alive(), "it beats for nobody"
        finally:
            gc.enable()


def test_a_model_that_is_dropped_is_freed_at_once() -> None:
    run_ranks(2, free_everything)
