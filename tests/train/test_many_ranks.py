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
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import samo
from samo.data.batches import Batch
from samo.errors import ConfigError, MaskError, PeerError, RunError
from samo.models.gpt import GPT, GPTConfig
from samo.train import learner as stepping
from samo.train.config import MeshConfig, TrainConfig, with_values
from samo.train.rank_group import RankGroup
from samo.train.run_dir import RunDir
from samo.train.staged_learner import StagedLearner
from samo.train.trainer import resume, train
from tests.ranks import _processes, run_ranks
from tests.train import helpers
from tests.train.helpers import interrupt_at, last_masks, lines, new_learner, tensors, text

__all__ = ["lines", "tensors", "text"]

SHAPE: Final = GPTConfig(num_layers=2, width=32, num_heads=2, context=8, vocab_size=64)
MESH: Final = MeshConfig(timeout_s=20.0)
SHARDED: Final = replace(MESH, shard="weights")

# Sums over parts of a batch are rounded otherwise than those over all of it, by some 1e-7; Adam
# divides by the size of a gradient, so that the smallest ones, mostly rounding, count as much as
# others.
CLOSE: Final = {"rel": 3e-5}


def small(text: Path, **values: Any) -> TrainConfig:
    usual = {
        **{"num_layers": 2, "batch_size": 7, "accumulate": 2, "steps": 6, "dense_steps": 2},
        **{"eval_every": 3, "save_every": 100, "sample_tokens": 4, "timeout_s": 20.0},
    }
    return helpers.small(text, **{**usual, **values})


def assert_same_course(one: Path, other: Path) -> None:
    steps, others = lines(one, "step"), lines(other, "step")
    for name in ("loss", "grad_norm"):
        assert [a[name] for a in others] == pytest.approx([a[name] for a in steps], **CLOSE)
    for name in ("step", "phase", "lr", "tokens", "epoch", "skipped_steps"):
        assert [a[name] for a in others] == [a[name] for a in steps]
    ours, theirs = ([line["valid_loss"] for line in lines(run, "eval")] for run in (one, other))
    assert theirs == pytest.approx(ours, **CLOSE)
    assert lines(one, "prune", "remap") == lines(other, "prune", "remap")


def train_here(rank: int, num_ranks: int, configs: dict[Path, TrainConfig]) -> None:
    for out, config in configs.items():
        train(config, out)
        if rank == 0:
            assert bool(lines(out, "sample")) == (config.mesh.num_stages == 1)


def train_until(rank: int, num_ranks: int, config: TrainConfig, out: Path, step: int) -> None:
    # Not the first rank: all of them stop for a signal that one of them got.
    result = train(config, out, listeners=[interrupt_at(step)] if rank == num_ranks - 1 else [])
    assert (result.signal, result.step) == (signal.SIGTERM, step + 1)


def resume_here(rank: int, num_ranks: int, meshes: dict[Path, MeshConfig]) -> None:
    for run, mesh in meshes.items():
        config = replace(RunDir.find(run).config(), mesh=mesh)
        assert resume(run, config=config).signal is None


# The same course in every layout


@pytest.mark.parametrize(("num_ranks", "pipe"), [(3, 1), (4, 2)])
def test_losses_do_not_depend_on_the_layout(
    tmp_path: Path, text: Path, num_ranks: int, pipe: int
) -> None:
    is_tied = pipe == 2  # a gradient that two stages and two replicas share
    train(small(text, tied=is_tied), tmp_path / "one")
    configs = {tmp_path / "many": small(text, tied=is_tied, pipe=pipe)}
    if pipe == 2:  # stages share one loss scale in every phase
        half = {"tied": is_tied, "dtype": "float16"}
        train(small(text, **half), tmp_path / "one-half")
        configs[tmp_path / "many-half"] = small(text, **half, pipe=pipe)
    run_ranks(num_ranks, train_here, configs)
    assert_same_course(tmp_path / "one", tmp_path / "many")
    ours, theirs = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert {name: t.dtype for name, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert last_masks(tmp_path / "many").kept == last_masks(tmp_path / "one").kept
    for rank in range(num_ranks):
        traffic = [e for e in lines(tmp_path / "many", "traffic") if e["rank"] == rank]
        assert [line["step"] for line in traffic] == list(range(1, 7))
        assert (traffic[-1]["activation_bytes"] > 0) == (pipe > 1)
        assert traffic[-1]["gradient_bytes"] > 0
    timelines = lines(tmp_path / "many", "timeline")
    assert [(line["step"], line["num_stages"]) for line in timelines] == [(6, pipe)] * (pipe > 1)
    assert all(len(line["stages"]) == 2 * 3 * pipe for line in timelines)
    record = json.loads((tmp_path / "many" / "run.json").read_text())
    grid = {"pipe": pipe, "data": num_ranks // pipe}
    if pipe > 1:  # what "auto" became: at most one for each of a replica's 7 // 2 sequences
        grid["micro_batches"] = 3
        halves = (lines(tmp_path / name, "step") for name in ("one-half", "many-half"))
        for mine, other in zip(*halves, strict=True):
            # 16-bit products of smaller batches are rounded otherwise.
            assert other["loss"] == pytest.approx(mine["loss"], rel=2e-3)
            assert other["skipped_steps"] == mine["skipped_steps"]
    assert record["ranks"] == grid
    assert record["config"]["mesh"]["data"] == "auto"
    # The state of all stages is accounted for as that of one process.
    alone, first = (lines(tmp_path / name, "state")[-1] for name in ("one", "many"))
    assert first["measured_bytes"] == sum(first["rank_bytes"][:: num_ranks // pipe])
    assert first["measured_bytes"] == sum(first["measured"].values())
    copies = first["num_params"] - alone["num_params"]  # of a tied weight, on two stages
    assert first["dense_bytes"] == alone["dense_bytes"] + 16 * copies
    assert (first["measured_bytes"] == alone["measured_bytes"]) == (copies == 0)


@pytest.mark.slow
def test_methods_and_several_stages_train_on_two_ranks_as_on_one(
    tmp_path: Path, text: Path
) -> None:
    methods: dict[str, dict[str, Any]] = {
        "rigl": {"mask_every": 2, "mask_stop": 5, "dense_steps": 0},
        "set": {"mask_every": 2, "mask_stop": 5, "dense_steps": 0},
        "gradual": {"mask_every": 1, "mask_stop": 5, "dense_steps": 1},
        "early-bird": {"mask_every": 1, "queue": 2, "dense_steps": 4, "threshold": 0.5},
    }
    one = {tmp_path / name: small(text, method=name, **how) for name, how in methods.items()}
    one[tmp_path / "stages"] = small(text)
    train_here(0, 1, one)
    many = {tmp_path / f"{name}-2": one[tmp_path / name] for name in methods}
    many[tmp_path / "stages-2"] = small(text, pipe=2, stages_per_rank=2)
    run_ranks(2, train_here, many)
    assert_same_course(tmp_path / "stages", tmp_path / "stages-2")
    for name in methods:
        assert_same_course(tmp_path / name, tmp_path / f"{name}-2")
        a, b = (last_masks(tmp_path / run) for run in (name, f"{name}-2"))
        differing = 1 - (a & b).kept / a.kept
        assert differing < 0.01, "rounding may turn the choice between almost equal weights alone"


def test_a_run_resumes_in_any_other_layout(tmp_path: Path, text: Path) -> None:
    train(small(text), tmp_path / "one")
    many = tmp_path / "many"
    run_ranks(4, train_until, small(text, pipe=2), many, 4)
    layouts = {"3x1": replace(MESH, pipe=3), "1x3": replace(MESH, data=3), "1x1": MESH}
    for name in layouts:
        shutil.copytree(many, tmp_path / name)
    with pytest.raises(ConfigError, match="pipe=2 does not make up 1 rank; these do: pipe=1"):
        resume(tmp_path / "1x1")
    resume_here(0, 1, {tmp_path / "1x1": MESH})
    run_ranks(3, resume_here, {tmp_path / name: layouts[name] for name in ("3x1", "1x3")})
    for name, mesh in layouts.items():
        assert_same_course(tmp_path / "one", tmp_path / name)
        assert (
            json.loads((tmp_path / name / "run.json").read_text())["ranks"]["pipe"]
            == mesh.num_stages
        )


# Shards of one model


@pytest.mark.slow
def test_shards_of_a_model_train_as_one_process_does_and_resume_in_any_layout(
    tmp_path: Path, text: Path
) -> None:
    config = small(text, tied=True, checkpointing=True, eval_batches=3, batch_size=4)
    one, many = tmp_path / "one", tmp_path / "many"
    train(config, one)
    run_ranks(3, train_until, replace(config, mesh=SHARDED), many, 4)
    recorded = json.loads((many / "run.json").read_text())["config"]
    assert (recorded["run"]["weights"], recorded["mesh"]["shard"]) == ("streamed", "weights")
    layouts = {"alone": SHARDED, "replicas": MESH, "shards": SHARDED}
    for name in layouts:
        shutil.copytree(many, tmp_path / name)
    resume_here(0, 1, {tmp_path / "alone": SHARDED})  # nobody is there to share it with
    run_ranks(2, resume_here, {tmp_path / name: layouts[name] for name in ("replicas", "shards")})
    for name in layouts:
        assert_same_course(one, tmp_path / name)
        kinds = [
            {key: (t.dtype, t.shape) for key, t in tensors(run).items()}
            for run in (one, tmp_path / name)
        ]
        assert kinds[0] == kinds[1]
        assert lines(tmp_path / name, "sample")[-1]["text"] == lines(one, "sample")[-1]["text"]
    # A shard is as large as predicted, and all of them are as much as one process has.
    alone, shared = (lines(tmp_path / name, "state")[-1] for name in ("alone", "shards"))
    assert shared["measured"] == shared["predicted"]
    together = sum(shared["rank_bytes"]) - shared["measured"]["bitmap"]
    assert together == alone["measured_bytes"]
    traffic = [lines(tmp_path / name, "traffic")[-1] for name in ("replicas", "shards")]
    assert traffic[0]["gradient_bytes"] == traffic[1]["gradient_bytes"]


class _WideGPT(GPT):
    """A GPT whose loss keeps the digits of its logits."""

    def _loss(self, x_ND: torch.Tensor, targets_N: torch.Tensor, reduction: str) -> torch.Tensor:
        return F.cross_entropy(self.head(x_ND), targets_N, reduction=reduction)


def batches_of(rank: int, num_ranks: int, step: int) -> list[Batch]:
    rows = slice(4 * rank // num_ranks, 4 * (rank + 1) // num_ranks)
    tokens = torch.randint(0, 64, (2, 4, 9), generator=torch.Generator().manual_seed(step))
    return [Batch(t[rows, :-1], t[rows, 1:], num_tokens=32, num_read=32) for t in tokens]


Course = tuple[list[float], int, dict[str, torch.Tensor]]


def shard_courses(rank: int, num_ranks: int, cases: list[tuple[str, bool]]) -> list[Course]:
    """Train pruned in shards, compiled or not; one rank's gradient overflows in a step."""
    stepping.BACKEND = "aot_eager"  # computes as eager mode does
    ranks, found = RankGroup.join(MESH, "cpu"), []
    for dtype, is_compiled in cases:
        torch.manual_seed(0)
        model = _WideGPT(SHAPE).double() if dtype == "float64" else GPT(SHAPE)
        run = {"dtype": dtype, "weights": "streamed", "compile": is_compiled}
        learner = new_learner(model, ranks=ranks, shard="weights", density_power=-1.0, **run)
        learner.prune(samo.prune(learner.model, 0.5))
        losses = []
        for step in range(4):
            losses.append(learner.whole_loss(learner.backward(batches_of(rank, num_ranks, step))))
            if step == 2 and rank == 0:
                grad: Any = dict(learner.model.named_parameters())["norm.weight"].grad
                (grad.to_local() if num_ranks > 1 else grad)[0] = torch.inf
            learner.step(1e-3)
        values = {
            name: (p.full_tensor() if num_ranks > 1 else p).detach()  # type: ignore[attr-defined]
            for name, p in learner.model.named_parameters()
        }
        found.append((losses, learner.skipped_steps, values))
    return found


@pytest.mark.slow
def test_shards_agree_with_one_process_on_losses_and_on_steps_to_skip() -> None:
    cases = [("float64", False), ("float16", False), ("bfloat16", False), ("bfloat16", True)]
    alone = shard_courses(0, 1, cases[:2])
    for wide, half, eager, compiled in run_ranks(2, shard_courses, cases):
        assert wide[1] == half[1] == eager[1] == alone[0][1] == alone[1][1] == 1
        # fp64: sums of parts are rounded otherwise. fp16: products of smaller batches, too.
        assert wide[0] == pytest.approx(alone[0][0], abs=1e-12, rel=0)
        assert half[0] == pytest.approx(alone[1][0], abs=2e-3, rel=0)
        for name, value in alone[0][2].items():
            torch.testing.assert_close(wide[2][name], value, rtol=0, atol=1e-12, msg=name)
        assert eager[0] == compiled[0]
        assert all(torch.equal(value, compiled[2][name]) for name, value in eager[2].items())


# Replicas of a learner

TYPES: Final = {
    # What one process and several differ by: the order of sums; sums of 16-bit gradients.
    ("float32", "exact"): 2e-6,
    ("float16", "exact"): 2e-4,
    ("bfloat16", "lean"): 2e-3,
}


def replica_courses(rank: int, num_ranks: int) -> list[tuple[list[float], int]]:
    """Train dense, pruned, and with fewer weights kept; return losses, and bytes sent a step."""
    ranks, found = RankGroup.join(MESH, "cpu"), []
    for dtype, state in TYPES:
        torch.manual_seed(0)
        how = {"dtype": dtype, "state": state, "density_power": -1.0}
        learner = new_learner(GPT(SHAPE), ranks=ranks, **how)
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
            losses.append(learner.whole_loss(learner.backward(batches_of(rank, num_ranks, step))))
            sent = learner.traffic()["gradient_bytes"]
            learner.step(1e-3)
            sent = learner.traffic()["gradient_bytes"] - sent
        gc.enable()
        found.append((losses, sent))
    return found


def test_replicas_learn_what_one_process_learns() -> None:
    alone = replica_courses(0, 1)
    first, second = run_ranks(2, replica_courses)
    assert first == second
    model = GPT(SHAPE)
    kept = sum(p.numel() for p in model.parameters()) - round(0.75 * samo.prune(model, 0.75).numel)
    for (dtype, state), one, (losses, sent) in zip(TYPES, alone, first):
        assert losses == pytest.approx(one[0], abs=TYPES[dtype, state])
        assert sent == kept * (2 if dtype == "bfloat16" else 4)


# Refusals and failures


def said_by(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ConfigError, MaskError, PeerError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(rank: int, num_ranks: int, config: TrainConfig, out: Path) -> list[str]:
    other = with_values(config, seed=rank)
    learner = new_learner(GPT(SHAPE), ranks=RankGroup.join(MESH, "cpu"))
    masks = samo.prune(learner.model, 0.5, method="random", seed=rank)
    return [
        said_by(train, other, out / "new"),
        said_by(train, config, out),
        said_by(learner.prune, masks),
    ]


def test_what_one_rank_refuses_ends_all(tmp_path: Path, text: Path) -> None:
    first, second = run_ranks(2, refused, small(text), tmp_path)
    for said in (first[0], second[0]):
        assert "rank 0 and rank 1 do not have the same settings; start all ranks" in said
    assert first[1].startswith("RunError: ")
    assert "is not empty" in first[1]
    assert second[1].startswith("PeerError: rank 0 failed: ")
    assert "is not the same on rank" in first[2]
    assert "is not the same on rank" in second[2]


def test_masks_of_weights_that_no_stage_has_are_refused() -> None:
    learner = SimpleNamespace(names=["blocks.0.mlp.0.weight"])
    with pytest.raises(MaskError, match=r"have 'blocks.0.attention.*not a weight of the model"):
        StagedLearner.own_masks(learner, samo.prune(GPT(SHAPE), 0.5))  # type: ignore[arg-type]


def meet_nobody(rank: int, num_ranks: int) -> tuple[tuple[int, ...], str]:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    port = store.underlying_store.port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
    os.environ |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(PeerError) as found:
        RankGroup.join(MeshConfig(pipe=2, timeout_s=1.0), "cpu")
    return found.value.ranks, str(found.value)


def test_ranks_that_do_not_join_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, message = run_ranks(1, meet_nobody, lost={1})[0]
    assert ranks == (1,)
    where = "the 2 ranks did not meet within 1 s: rank 1 (stage 1 of 2) did not join; see its log"
    assert message.startswith(where)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")  # where nothing listens
    with pytest.raises(PeerError, match=r"the 2 ranks did not meet within 0.5 s: start them all"):
        RankGroup.join(MeshConfig(timeout_s=0.5), "cpu")


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
        RankGroup.join(MeshConfig(pipe=2, timeout_s=0.3), "cpu")


def test_a_process_that_waits_in_a_backend_ends_with_the_name_of_the_rank(tmp_path: Path) -> None:
    errors = tmp_path / "errors.txt"
    process = _processes.Process(target=wait_for_nobody, args=(str(errors),), daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 1
    message = errors.read_text()
    assert message.startswith("samo: rank 0: no heartbeat from rank 1 (stage 1 of 2) for ")
    assert "(--timeout-s 0.3); this rank exits. Resume with --resume" in message


class Heartbeats(SimpleNamespace):
    """What a watchdog knows of the ranks."""

    def __init__(self, stopped: tuple[int, ...], root_cause: tuple[int, ...] = ()) -> None:
        recorded: list[tuple[int, ...]] = []
        super().__init__(
            stopped=lambda ranks=None: stopped,
            root_cause=lambda: root_cause,
            record_root_cause=recorded.append,
            recorded=recorded,
            close=lambda: None,
        )


def test_an_error_is_attributed_to_the_rank_that_failed() -> None:
    ranks = RankGroup(watchdog=Heartbeats(stopped=(3,)))  # type: ignore[arg-type]
    ranks.rank, ranks.num_stages, ranks.num_replicas = 1, 2, 2
    for own in (RunError("no room"), torch.OutOfMemoryError("out of memory")):
        with pytest.raises(type(own)), ranks.watched():
            raise own

    def attributed(error: RuntimeError) -> PeerError:
        with pytest.raises(PeerError) as found, ranks.watched():
            raise error
        return found.value

    found = attributed(RuntimeError("Connection closed\nby peer"))
    assert found.ranks == (3,)
    assert str(found).endswith("The backend said: Connection closed (rank 3 is stage 1 of 2)")
    neighbour = PeerError("rank 1 (stage 0 of 2) has been silent for 8.0 s", (1,), stage=0)
    found = attributed(neighbour)  # which itself waits for rank 3
    assert str(found).startswith("rank 3 failed, and because of it: rank 1 ")
    assert found.ranks == (3,)
    heartbeats = Heartbeats(stopped=(0,), root_cause=(3,))
    ranks.watchdog = heartbeats  # type: ignore[assignment]
    found = attributed(PeerError("rank 0 stopped", (0,), is_diagnosed=True))
    assert str(found).startswith("rank 3 failed, and because of it: rank 0 stopped")
    assert heartbeats.recorded == [(3,)]
    ranks.watchdog = Heartbeats(stopped=(), root_cause=(1,))  # type: ignore[assignment]
    error = PeerError("rank 0 stopped", (0,), stage=0, is_diagnosed=True)
    assert attributed(error) is error  # the others have given up this one: what it knows counts
