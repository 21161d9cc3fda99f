"""Runs on many ranks against the same run on one: losses, masks, checkpoints, refusals."""

import datetime
import gc
import json
import os
import shutil
import signal
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import samo
from samo.data.batches import Batch
from samo.errors import ConfigError, MaskError, PeerError, RunError
from samo.models.gpt import GPT, GPTConfig
from samo.train import compile as compiling
from samo.train.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    PruneConfig,
    RunConfig,
    TrainConfig,
)
from samo.train.ranks import Ranks
from samo.train.run_dir import RunDir
from samo.train.step import Learner
from samo.train.trainer import resume, train
from tests.ranks import _processes, run_ranks
from tests.train.helpers import interrupt_at, lines, optim, tensors, text

__all__ = ["lines", "tensors", "text"]

SHAPE: Final = GPTConfig(num_layers=2, width=32, num_heads=2, context=8, vocab_size=64)

# Sums over parts of a batch are rounded otherwise than those over all of it, by some 1e-7; Adam
# divides by the size of a gradient, so that the smallest ones, mostly rounding, count as much as
# others.
CLOSE: Final = {"rel": 3e-5}


def small(text: Path, mesh: dict[str, Any] | None = None, **prune: Any) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(train=(text,)),
        model=ModelConfig(num_layers=2, width=32, num_heads=2, context=32),
        prune=PruneConfig(**{"dense_steps": 2, **prune}),
        run=RunConfig(
            steps=6,
            batch_size=7,
            accumulate=2,
            eval_every=3,
            eval_batches=2,
            save_every=100,
            log_every=1,
            sample_tokens=4,
        ),
        mesh=MeshConfig(**{"timeout_s": 20.0, **(mesh or {})}),
    )


def assert_same_course(one: Path, other: Path) -> None:
    steps, others = lines(one, "step"), lines(other, "step")
    for name in ("loss", "grad_norm"):
        assert [a[name] for a in others] == pytest.approx([a[name] for a in steps], **CLOSE)
    for name in ("step", "phase", "lr", "tokens", "epoch", "skipped_steps"):
        assert [a[name] for a in others] == [a[name] for a in steps]
    ours, theirs = lines(one, "eval"), lines(other, "eval")
    assert [a["valid_loss"] for a in theirs] == pytest.approx(
        [a["valid_loss"] for a in ours], **CLOSE
    )
    for a, b in zip(lines(one, "prune", "remap"), lines(other, "prune", "remap"), strict=True):
        assert a == b


def assert_whole_state(one: Path, many: Path, num_replicas: int) -> None:
    """The state of all stages is accounted for as that of one process, beside each rank's own."""
    alone, first = lines(one, "state")[-1], lines(many, "state")[-1]
    each = [first["rank_bytes"][0]]
    for rank in range(1, len(first["rank_bytes"])):
        own = [
            json.loads(line)
            for line in (many / f"metrics.rank{rank}.jsonl").read_text().splitlines()
            if '"state"' in line
        ][-1]
        each.append(own["measured_bytes"])
        assert own["rank_bytes"] == first["rank_bytes"]
    assert first["rank_bytes"] == each
    assert first["measured_bytes"] == sum(each[::num_replicas])
    assert first["measured_bytes"] == sum(first["measured"].values())
    copies = first["num_params"] - alone["num_params"]  # of a tied weight, on two stages
    assert first["dense_bytes"] == alone["dense_bytes"] + 16 * copies
    assert first["measured_bytes"] >= alone["measured_bytes"]
    assert (first["measured_bytes"] == alone["measured_bytes"]) == (copies == 0)


def train_here(rank: int, num_ranks: int, configs: dict[Path, TrainConfig]) -> None:
    for out, config in configs.items():
        result = train(config, out)
        assert (result.sample is not None) == (rank == 0 and config.mesh.pipe == 1)


def train_until(rank: int, num_ranks: int, config: TrainConfig, out: Path, step: int) -> None:
    # Not the first rank: all of them stop for a signal that one of them got.
    result = train(config, out, listeners=[interrupt_at(step)] if rank == num_ranks - 1 else [])
    assert (result.signal, result.step, result.saved_step) == (signal.SIGTERM, step, step)


def resume_here(rank: int, num_ranks: int, run: Path, mesh: MeshConfig) -> None:
    config = replace(RunDir.find(run).config(), mesh=mesh)
    assert resume(run, config=config).signal is None


# The same course in every layout
# -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "mesh"), [(3, {}), (2, {"pipe": 2}), (4, {"pipe": 2})], ids=str
)
def test_losses_do_not_depend_on_the_layout(
    tmp_path: Path, text: Path, num_ranks: int, mesh: dict[str, Any]
) -> None:
    is_tied = num_ranks == 4  # a gradient that two stages and two replicas share
    one, many = (
        replace(config, model=replace(config.model, tied=is_tied))
        for config in (small(text), small(text, mesh))
    )
    train(one, tmp_path / "one")
    run_ranks(num_ranks, train_here, {tmp_path / "many": many})
    assert_same_course(tmp_path / "one", tmp_path / "many")
    ours, theirs = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert ours.keys() == theirs.keys()
    assert {name: t.dtype for name, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    masks = samo.Masks.load(tmp_path / "many" / "masks.safetensors")
    assert masks == samo.load_masks(tmp_path / "many" / "checkpoints" / "last")
    assert masks.kept == samo.Masks.load(tmp_path / "one" / "masks.safetensors").kept
    for rank in range(1, num_ranks):
        found = (tmp_path / "many" / f"metrics.rank{rank}.jsonl").read_text().splitlines()
        traffic = [json.loads(line) for line in found if '"traffic"' in line]
        assert [line["step"] for line in traffic] == list(range(1, 7))
        assert traffic[-1]["rank"] == rank
        assert (traffic[-1]["activation_bytes"] > 0) == (mesh.get("pipe", 1) > 1)
        assert (traffic[-1]["gradient_bytes"] > 0) == (num_ranks > mesh.get("pipe", 1))
    record = json.loads((tmp_path / "many" / "run.json").read_text())
    pipe = mesh.get("pipe", 1)
    grid = {"pipe": pipe, "data": num_ranks // pipe}
    if pipe > 1:  # what "auto" became: at most one for each of a replica's 7 // 2 sequences
        grid["micro_batches"] = 3 if num_ranks == 4 else 4
    assert record["ranks"] == grid
    assert_whole_state(tmp_path / "one", tmp_path / "many", num_ranks // pipe)
    assert record["config"]["mesh"]["data"] == "auto"


def test_stages_share_one_loss_scale_in_every_phase(tmp_path: Path, text: Path) -> None:
    one, many = (
        replace(config, run=replace(config.run, dtype="float16"))
        for config in (small(text), small(text, {"pipe": 2}))
    )
    train(one, tmp_path / "one")
    run_ranks(4, train_here, {tmp_path / "many": many})
    for ours, theirs in zip(lines(tmp_path / "one", "step"), lines(tmp_path / "many", "step")):
        # 16-bit products of smaller batches are rounded otherwise.
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=2e-3)
        assert theirs["skipped_steps"] == ours["skipped_steps"]


def test_methods_choose_the_same_masks_on_two_ranks_as_on_one(tmp_path: Path, text: Path) -> None:
    methods: dict[str, dict[str, Any]] = {
        "rigl": {"mask_every": 2, "mask_stop": 5, "dense_steps": 0},
        "set": {"mask_every": 2, "mask_stop": 5, "dense_steps": 0},
        "gradual": {"mask_every": 1, "mask_stop": 5, "dense_steps": 1},
        "early-bird": {"mask_every": 1, "queue": 2, "dense_steps": 4, "threshold": 0.5},
    }
    for method, settings in methods.items():
        train(small(text, method=method, **settings), tmp_path / method)
    many = {
        tmp_path / f"{method}-2": small(text, method=method, **settings)
        for method, settings in methods.items()
    }
    run_ranks(2, train_here, many)
    for method in methods:
        one, two = tmp_path / method, tmp_path / f"{method}-2"
        assert_same_course(one, two)
        a, b = (samo.Masks.load(run / "masks.safetensors") for run in (one, two))
        differing = 1 - (a & b).kept / a.kept
        assert differing < 0.01, "rounding may turn the choice between almost equal weights alone"


# Shares of one model -----------------------------------------------------------------------------

SHARDED: Final = {"shard": "weights"}


@pytest.mark.slow
def test_shards_of_a_model_train_as_one_process_does_and_resume_in_any_layout(
    tmp_path: Path, text: Path
) -> None:
    def config(mesh: dict[str, Any]) -> TrainConfig:
        found = small(text, mesh)
        model = replace(found.model, tied=True, checkpointing=True)
        return replace(found, model=model, run=replace(found.run, eval_batches=3, batch_size=4))

    one, many = tmp_path / "one", tmp_path / "many"
    train(config({}), one)
    run_ranks(3, train_until, config(SHARDED), many, 4)
    recorded = json.loads((many / "run.json").read_text())["config"]
    assert (recorded["run"]["weights"], recorded["mesh"]["shard"]) == ("streamed", "weights")
    mesh = MeshConfig(timeout_s=20.0)
    layouts = {
        "alone": (1, replace(mesh, shard="weights")),  # nobody is there to share it with
        "replicas": (2, mesh),
        "shares": (2, replace(mesh, shard="weights")),
    }
    for name, (size, wanted) in layouts.items():
        other = tmp_path / name
        shutil.copytree(many, other)
        if size == 1:
            resume_here(0, 1, other, wanted)
        else:
            run_ranks(size, resume_here, other, wanted)
        assert_same_course(one, other)
        ours, theirs = tensors(one), tensors(other)
        assert ours.keys() == theirs.keys()
        assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {
            n: (t.dtype, t.shape) for n, t in theirs.items()
        }
    # A share is as large as predicted, and all of them are as much as one process has.
    alone, shared = lines(tmp_path / "alone", "state")[-1], lines(tmp_path / "shares", "state")[-1]
    assert shared["measured"] == shared["predicted"]
    assert len(shared["rank_bytes"]) == 2
    together = sum(shared["rank_bytes"]) - shared["measured"]["bitmap"]
    assert together == alone["measured_bytes"]
    replicas = lines(tmp_path / "replicas", "traffic")[-1]
    assert lines(tmp_path / "shares", "traffic")[-1]["gradient_bytes"] == replicas["gradient_bytes"]
    samples = [lines(tmp_path / name, "sample")[-1]["text"] for name in layouts]
    assert samples == [lines(one, "sample")[-1]["text"]] * 3


class _WideGPT(GPT):
    """A GPT whose loss keeps the digits of its logits."""

    def _loss(self, x_ND: torch.Tensor, targets_N: torch.Tensor, reduction: str) -> torch.Tensor:
        return F.cross_entropy(self.head(x_ND), targets_N, reduction=reduction)


def share_course(
    rank: int, num_ranks: int, dtype: torch.dtype, bad_step: int, is_compiled: bool = False
) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """Train pruned in shares; one rank's gradient overflows in a step."""
    ranks = Ranks.join(MeshConfig(timeout_s=20.0), "cpu")
    torch.manual_seed(0)
    model = _WideGPT(SHAPE).double() if dtype == torch.float64 else GPT(SHAPE)
    compiling.BACKEND = "aot_eager"  # computes as eager mode does
    learner = Learner(
        model,
        optim(density_power=-1.0),
        dtype=dtype,
        ranks=ranks,
        weights="streamed",
        is_sharded=num_ranks > 1,
        is_compiled=is_compiled,
    )
    learner.prune(samo.prune(learner.model, 0.5))
    losses = []
    for step in range(4):
        rows = slice(4 * rank // num_ranks, 4 * (rank + 1) // num_ranks)
        tokens = torch.randint(0, 64, (2, 4, 9), generator=torch.Generator().manual_seed(step))
        batches = [Batch(t[rows, :-1], t[rows, 1:], whole_tokens=32) for t in tokens]
        losses.append(learner.whole_loss(learner.backward(batches)))
        if step == bad_step and rank == 0:
            grad: Any = dict(learner.model.named_parameters())["norm.weight"].grad
            (grad.to_local() if num_ranks > 1 else grad)[0] = torch.inf
        learner.step(1e-3)
    values = {
        name: (p.full_tensor() if num_ranks > 1 else p).detach()  # type: ignore[attr-defined]
        for name, p in learner.model.named_parameters()
    }
    return losses, learner.skipped_steps, values


@pytest.mark.slow
def test_shares_of_compiled_blocks_are_those_of_eager_ones() -> None:
    eager, compiled = (run_ranks(2, share_course, torch.bfloat16, 9, on)[0] for on in (False, True))
    assert eager[0] == compiled[0]
    assert all(torch.equal(value, compiled[2][name]) for name, value in eager[2].items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_shares_agree_with_one_process_and_on_steps_to_skip(dtype: torch.dtype) -> None:
    # fp64: sums of parts are rounded otherwise. fp16: products of smaller batches, too.
    close = 1e-12 if dtype == torch.float64 else 2e-3
    losses, skipped, values = share_course(0, 1, dtype, 2)
    assert skipped == 1
    for found in run_ranks(3, share_course, dtype, 2):
        assert found[1] == 1
        assert found[0] == pytest.approx(losses, abs=close, rel=0)
        if dtype == torch.float64:  # Adam turns what 16-bit products differ by into whole steps
            for name, value in values.items():
                torch.testing.assert_close(found[2][name], value, rtol=0, atol=1e-12, msg=name)


# Replicas of a learner
# -----------------------------------------------------------------------------

TYPES: Final = [
    # What one process and several differ by: the order of sums; sums of 16-bit gradients.
    (torch.float32, "exact", 2e-6),
    (torch.float16, "exact", 2e-4),
    (torch.bfloat16, "lean", 2e-3),
]


def course(
    rank: int, num_ranks: int, dtype: torch.dtype, state: Literal["exact", "lean"]
) -> tuple[list[float], int]:
    """Train densely, compressed, and with fewer weights kept; return losses, and bytes sent a step."""
    ranks = Ranks.join(MeshConfig(timeout_s=20.0), "cpu")
    torch.manual_seed(0)
    learner = Learner(GPT(SHAPE), optim(density_power=-1.0, state=state), dtype=dtype, ranks=ranks)
    losses = []
    gc.disable()  # what replicas hold of old parameters goes at once, not some time
    for step in range(6):
        before = None if learner._ddp is None else weakref.ref(learner._ddp)
        if step == 2:
            learner.prune(samo.prune(learner.model, 0.5))
        elif step == 4:
            masks = samo.prune(learner.model, 0.75)
            samo.remap_(learner.model, masks, learner.opt)
            learner.remapped(masks)
        assert before is None or (before() is None) == (step in (2, 4))
        rows = slice(4 * rank // num_ranks, 4 * (rank + 1) // num_ranks)
        tokens = torch.randint(0, 64, (2, 4, 9), generator=torch.Generator().manual_seed(step))
        batches = [Batch(t[rows, :-1], t[rows, 1:], whole_tokens=32) for t in tokens]
        losses.append(learner.whole_loss(learner.backward(batches)))
        sent = (learner.traffic() or {"gradient_bytes": 0})["gradient_bytes"]
        learner.step(1e-3)
        sent = (learner.traffic() or {"gradient_bytes": 0})["gradient_bytes"] - sent
    return losses, sent


@pytest.mark.parametrize(("dtype", "state", "close"), TYPES, ids=str)
def test_replicas_learn_what_one_process_learns(
    dtype: torch.dtype, state: Literal["exact", "lean"], close: float
) -> None:
    one, _ = course(0, 1, dtype, state)
    gc.enable()
    first, second = run_ranks(2, course, dtype, state)
    assert first == second
    losses, sent = first
    assert losses == pytest.approx(one, abs=close)
    model = GPT(SHAPE)
    kept = sum(p.numel() for p in model.parameters()) - round(0.75 * samo.prune(model, 0.75).numel)
    assert sent == kept * (2 if dtype == torch.bfloat16 else 4)


# Checkpoints go from one layout to another --------------------------------------------------------


def test_a_run_goes_on_in_any_other_layout(tmp_path: Path, text: Path) -> None:
    train(small(text), tmp_path / "one")
    run_ranks(4, train_until, small(text, {"pipe": 2}), tmp_path / "many", 4)
    resume_alone = tmp_path / "1x1"
    shutil.copytree(tmp_path / "many", resume_alone)
    with pytest.raises(
        ConfigError, match=r"pipe=2 does not make up 1 rank; these do: pipe=1 x data=1"
    ):
        resume(resume_alone)
    stale = resume_alone / "metrics.rank3.jsonl"
    stale.write_text(stale.read_text() + '{"event": "end", "step": 5, "reason": "done"}\n')
    resume_here(0, 1, resume_alone, MeshConfig())
    assert_same_course(tmp_path / "one", resume_alone)
    assert [json.loads(line)["step"] for line in stale.read_text().splitlines()][-1] == 4
    layouts = {
        "3x1": (3, MeshConfig(pipe=3)),
        "1x3": (3, MeshConfig(data=3)),
    }
    for name, (num_ranks, mesh) in layouts.items():
        shutil.copytree(tmp_path / "many", tmp_path / name)
        run_ranks(num_ranks, resume_here, tmp_path / name, replace(mesh, timeout_s=20.0))
        assert_same_course(tmp_path / "one", tmp_path / name)
        assert json.loads((tmp_path / name / "run.json").read_text())["ranks"]["pipe"] == mesh.pipe


# Refusals -----------------------------------------------------------------------------------------


def refused(rank: int, num_ranks: int, config: TrainConfig, out: Path) -> str:
    kinds = (ConfigError, PeerError, RunError)
    try:
        train(config if rank else replace(config, run=replace(config.run, seed=1)), out)
    except kinds as error:
        first = f"{type(error).__name__}: {error}"
    try:
        train(config, out)
    except kinds as error:
        return f"{first} | {type(error).__name__}: {error}"
    return ""


def test_what_one_rank_refuses_ends_all(tmp_path: Path, text: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    first, second = run_ranks(2, refused, small(text), tmp_path / "full")
    for said in (first, second):
        assert "rank 1 and rank 0 do not have the same settings; start all ranks" in said
    assert "| RunError: " in first
    assert "is not empty" in first
    assert "| PeerError: rank 0 stopped: " in second


# Parts --------------------------------------------------------------------------------------------


def _begins(start: str, name: str) -> bool:
    return name.startswith(start)


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_draw_the_weights_that_one_process_draws(is_tied: bool) -> None:
    from samo.models.gpt import draw_weights

    config = GPTConfig(num_layers=3, width=16, num_heads=2, context=8, is_tied=is_tied)
    torch.manual_seed(5)
    whole = dict(GPT(config).named_parameters())
    for kept in ("embed", "blocks.0.", "blocks.2.", "norm", ""):
        torch.manual_seed(5)
        drawn = draw_weights(config, partial(_begins, kept))
        assert drawn.keys() == {name for name in whole if name.startswith(kept)}
        for name, values in drawn.items():
            assert torch.equal(values, whole[name]), name


def a_learner(ranks: Ranks | None = None) -> Learner:
    model = GPT(GPTConfig(num_layers=1, width=16, num_heads=2, context=8))
    return Learner(model, optim(), dtype=torch.float32, ranks=ranks)


def prune_differently(rank: int, num_ranks: int) -> str:
    learner = a_learner(Ranks.join(MeshConfig(timeout_s=20.0), "cpu"))
    try:
        learner.prune(samo.prune(learner.model, 0.5, method="random", seed=rank))
    except MaskError as error:
        return str(error)
    return ""


def test_masks_that_differ_between_ranks_are_refused() -> None:
    for said in run_ranks(2, prune_differently):
        assert "is not the same on rank" in said


def test_masks_of_weights_that_no_stage_has_are_refused() -> None:
    learner = a_learner()
    learner.stages = SimpleNamespace(names=["blocks.0.mlp.0.weight"])  # type: ignore[assignment]
    with pytest.raises(
        MaskError, match=r"the masks have 'blocks.0.attention.*not a weight of the model"
    ):
        learner.check_names(samo.prune(learner.model, 0.5))


def meet_nobody(rank: int, num_ranks: int) -> tuple[tuple[int, ...], int | None, str]:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    port = store.underlying_store.port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
    os.environ |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(PeerError) as found:
        Ranks.join(MeshConfig(pipe=2, timeout_s=1.0), "cpu")
    return found.value.ranks, found.value.stage, str(found.value)


def test_ranks_that_do_not_join_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, stage, message = run_ranks(1, meet_nobody, lost={1})[0]
    assert (ranks, stage) == ((1,), 1)
    assert message.startswith(
        "the 2 ranks did not meet within 1 s: rank 1 (stage 1 of 2) did not join, or stopped. Look"
    )
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")  # where nothing listens
    with pytest.raises(PeerError, match=r"the 2 ranks did not meet: .*; start them all"):
        Ranks.join(MeshConfig(timeout_s=0.5), "cpu")


def wait_for_nobody(errors: str) -> None:
    """Wait for a rank that never comes."""
    from samo.distributed import watchdog

    watchdog.PATIENCE_S = 0.1  # type: ignore[misc]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    real = dist.init_process_group
    dist.init_process_group = lambda *args, **settings: real(  # a backend that does not give up
        *args, **{**settings, "timeout": datetime.timedelta(seconds=60)}
    )
    with open(errors, "w") as sys.stderr:
        Ranks.join(MeshConfig(pipe=2, timeout_s=0.3), "cpu")


def test_a_process_that_waits_in_a_backend_ends_with_the_name_of_the_rank(tmp_path: Path) -> None:
    errors = tmp_path / "errors.txt"
    process = _processes.Process(target=wait_for_nobody, args=(str(errors),), daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 1
    message = errors.read_text()
    assert message.startswith("samo: rank 0: rank 1 (stage 1 of 2) has given no sign of life")
    assert "and --timeout-s is 0.3; this rank ends, which was waiting in " in message
    assert "ranks.join > mesh.join" in message


class Heartbeats(SimpleNamespace):
    """What a watchdog knows of the ranks."""

    def __init__(self, stopped: tuple[int, ...], root_cause: tuple[int, ...] = ()) -> None:
        recorded: list[tuple[int, ...]] = []
        super().__init__(
            stopped=lambda: stopped,
            root_cause=lambda: root_cause,
            record_root_cause=recorded.append,
            recorded=recorded,
            close=lambda: None,
        )


def test_an_error_is_attributed_to_the_rank_that_failed() -> None:
    assert Ranks().cause(RuntimeError("Connection closed")) is None  # there are no others
    ranks = Ranks(watchdog=Heartbeats(stopped=(3,)))  # type: ignore[arg-type]
    ranks.rank, ranks.num_stages, ranks.num_replicas = 1, 2, 2
    own = RunError("no room")
    assert ranks.cause(own) is own
    assert ranks.cause(torch.OutOfMemoryError("out of memory")) is None
    error = ranks.cause(RuntimeError("Connection closed\nby peer"))
    assert isinstance(error, PeerError)

    def attributed(error: PeerError) -> PeerError:
        with pytest.raises(PeerError) as found, ranks.watched():
            raise error
        return found.value

    found = attributed(error)
    assert (found.ranks, found.stage) == ((3,), 1)
    assert str(found).endswith("The backend said: Connection closed (rank 3 is stage 1 of 2)")
    neighbour = PeerError("rank 1 (stage 0 of 2) has been silent for 8.0 s", (1,), stage=0)
    found = attributed(neighbour)  # which itself waits for rank 3
    assert str(found).startswith("rank 3 failed, and because of it: rank 1 ")
    assert (found.ranks, found.stage) == ((3,), 1)
    ranks.watchdog = heartbeats = Heartbeats(stopped=(0,), root_cause=(3,))  # type: ignore[assignment]
    found = attributed(PeerError("rank 0 stopped", (0,), is_diagnosed=True))
    assert str(found).startswith("rank 3 failed, and because of it: rank 0 stopped")
    assert heartbeats.recorded == [(3,)]
    ranks.watchdog = Heartbeats(stopped=(), root_cause=(1,))  # type: ignore[assignment]
    error = PeerError("rank 0 stopped", (0,), stage=0, is_diagnosed=True)
    assert attributed(error) is error  # the others have given up this one: what it knows counts


@pytest.mark.slow
def test_two_stages_on_each_rank_train_alike(tmp_path: Path, text: Path) -> None:
    def config(mesh: dict[str, Any]) -> TrainConfig:
        found = small(text, mesh)
        return replace(found, run=replace(found.run, batch_size=8, accumulate=1))

    train(config({}), tmp_path / "one")
    run_ranks(2, train_here, {tmp_path / "two": config({"pipe": 2, "stages_per_rank": 2})})
    assert_same_course(tmp_path / "one", tmp_path / "two")
