"""Runs of `samo finetune` on several ranks, and typed ones."""

import functools
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samo
from samo.data.batches import Batches
from samo.train import causal_lm_subject
from samo.train.causal_lm_subject import CausalLMSubject
from samo.train.finetune_config import FinetuneConfig, FinetuneMesh
from samo.train.run_dir import RunDir
from samo.train.trainer import train
from tests.data.model_tokenizer import VOCAB_SIZE
from tests.ranks import run_ranks
from tests.train.helpers import last_masks, lines, tensors
from tests.train.test_finetune import opened, place, settings

__all__ = ["place"]  # the fixtures


def train_on_ranks(rank: int, num_ranks: int, configs: dict[Path, FinetuneConfig]) -> None:
    few = functools.partial(samo.chunk_loss_, max_logits=8 * VOCAB_SIZE)  # several chunks a pass
    causal_lm_subject.chunk_loss_ = few  # type: ignore[assignment]
    for run, config in configs.items():
        train(config, run)


@pytest.mark.slow
def test_two_ranks_take_the_course_of_one(place: Path, tmp_path: Path) -> None:
    config = settings(place, batch_size=3, accumulate=2, freeze_embeddings=True)
    train(config, tmp_path / "one")
    meshes = {"none": FinetuneMesh(timeout_s=60.0), "weights": FinetuneMesh(shard="weights")}
    runs = {tmp_path / name: replace(config, mesh=mesh) for name, mesh in meshes.items()}
    run_ranks(2, train_on_ranks, runs, timeout_s=120.0)
    ours = lines(tmp_path / "one", "step", "eval")
    wanted = tensors(tmp_path / "one")
    for run in runs:
        theirs = lines(run, "step", "eval")
        for name in ("loss", "grad_norm", "valid_loss"):
            # Sums over parts of a batch are rounded otherwise, by some 1e-7.
            assert [line.get(name, 0.0) for line in theirs] == pytest.approx(
                [line.get(name, 0.0) for line in ours], rel=3e-5
            )
        assert last_masks(run) == last_masks(tmp_path / "one")
        found = tensors(run)
        for name in wanted:
            if name.startswith("weights:"):
                # Adam divides by the size of a gradient, so that rounding counts: a step is 1e-3.
                torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-4)
        assert samo.masks(opened(run / "model")) == last_masks(run)


# The command


def test_a_run_is_typed_and_tells_what_it_made(place: Path, here: Path, type_in: Any) -> None:
    data = f"--data {place / 'notes.jsonl'}"
    flags = f"{data} --steps 2 --batch-size 2 --context 32 --sample-tokens 4 --lr 1e-3"
    said = type_in(f"finetune {place / 'pruned'} {flags}").out
    assert re.search(r"^memory: resident, exact: \S+ [kMG]B of .* that fit$", said, re.MULTILINE)
    assert "before training" in said
    assert "samo generate runs/pruned/model" in said
    assert "samo export runs/pruned/model" in said
    resume = "finetune --resume runs/pruned"
    assert "'runs/pruned' is complete; extend it with --steps" in type_in(resume).out
    type_in(f"{resume} --steps 3")
    said = type_in(f"{resume} --lr 1", 2).err
    assert "a resumed run keeps its settings, and --lr was 0.001, not 1" in said
    said = type_in("train --resume runs/pruned", 2).err
    assert "is a run of samo finetune; resume it with samo finetune" in said
    said = type_in(f"finetune {place / 'dense'} {data}", 2).err
    assert "is not pruned: 0 of 20,480 weights" in said
    said = type_in(f"finetune {place / 'dense'} {flags} --pattern 2:4 --out pruned").out
    assert "pruned first: --method wanda, calibrated on training data" in said
    assert [path.name for path in Path("runs").iterdir()] == ["pruned"]


def test_a_prompt_is_answered_and_all_tokens_read_are_counted(
    place: Path, here: Path, type_in: Any
) -> None:
    rows = [{"prompt": f"the fox jumps {word}", "completion": " it"} for word in ["over", "and"]]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    flags = "--steps 2 --batch-size 2 --context 32 --sample-tokens 4 --log-every 1"
    flags += f" --data asked.jsonl --teacher {place / 'dense'}"
    said = type_in(f"finetune {place / 'pruned'} {flags}").out
    assert re.search(r"loss \S+ \(text and teacher\)  ", said)
    run = Path("runs/pruned")
    assert "of text and teacher together" in (run / "report.html").read_text()
    (sample,) = lines(run, "sample")
    assert re.search(r"the fox jumps (over|and)$", sample["prompt"])
    subject = CausalLMSubject(RunDir.find(run).config(), RunDir.find(run))
    text = subject.open_text(run)
    batches = Batches(text.train, context=32, batch_size=2, seed=0)
    for line, read in zip(lines(run, "step"), itertools.accumulate(b.num_read for b in batches)):
        assert line["tokens"] == read
    batch = next(batches)
    assert batch.num_read > 2 * batch.num_tokens  # of which completions are few
