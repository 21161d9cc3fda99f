"""The quality benchmark runs at tiny sizes, keeps its rows, and compares fairly."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.measure import read_lines
from benchmarks.quality import gpt, rates, runs, spreads
from benchmarks.quality.gpt_run import DENSE_BYTES, Settings, matching_shape
from benchmarks.quality.text import even, find_text, order, windows

import samo
from samo.errors import DataError, RunError
from samo.models.gpt import GPT, GPTConfig
from tests.benchmarks.calling import call

CPU = torch.device("cpu")
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(4000)))
    return path


# GPTs


@pytest.mark.long
def test_gpts_run_once_and_leave_rows_page_and_figures(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    where = ("--quick", "--out", out, "--text", text_file, "--device", "cpu")
    common = (*where, "--steps", 24, "--lrs", 1e-3)
    call(gpt.main, *common, "--seeds", 0)
    rows = {row["contender"]: row for row in read_lines(out / "rows.jsonl")}
    assert list(rows) == [name for name, contender in gpt.CONTENDERS.items() if contender.is_usual]

    dense, pruned = rows["dense"], rows["magnitude-90"]["final_state_bytes"]
    assert dense["peak_state_bytes"] == dense["final_state_bytes"] == 16 * dense["num_params"]
    for name in ("random-90", "early-bird-90", "gradual-90"):
        assert rows[name]["final_state_bytes"] == pruned
    assert pruned <= rows["small-dense"]["final_state_bytes"] < dense["final_state_bytes"]
    assert 0 < rows["early-bird-90"]["large_steps"] <= 6  # a quarter of 24
    assert rows["gradual-90"]["large_steps"] == 14  # six tenths
    for row in rows.values():
        assert row["tokens"] == 24 * 4 * 32
        assert row["curve"][-1] == [row["tokens"], row["valid_loss"]]
        assert row["valid_loss"] < row["curve"][0][1]  # it learns

    before = (out / "rows.jsonl").read_bytes()
    call(gpt.main, *common, "--seeds", 0)  # nothing is left to do
    assert (out / "rows.jsonl").read_bytes() == before
    page = (out / "README.md").read_text()
    assert page.count("\n| ") == 2 + len(rows)
    assert f"{dense['valid_loss']:.3f} | - |" in page
    for name in ("loss", "curves"):
        assert (out / f"{name}.png").read_bytes().startswith(PNG)
        assert "</svg>" in (out / f"{name}.svg").read_text()

    (out / "README.md").unlink()
    call(gpt.main, "--out", out, "--page-only")
    assert (out / "README.md").read_text() == page

    # With a second rate there is a table of rates; NaN is never the best.
    second = [json.dumps(row | {"lr": 3e-3, "valid_loss": float("nan")}) for row in rows.values()]
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "rows.jsonl").write_text(before.decode() + "\n".join(second) + "\n")
    call(gpt.main, "--out", tmp_path / "two", "--page-only")
    page = (tmp_path / "two" / "README.md").read_text()
    assert "| contender | rate 0.001 | rate 0.003 |" in page
    assert f"| dense | {dense['valid_loss']:.3f} | nan |" in page

    with pytest.raises(SystemExit, match=r"rows of other settings.*batch 4 and now 5"):
        call(gpt.main, *common, "--batch", 5)


@pytest.mark.parametrize(("layers", "width"), [(2, 64), (3, 96)])
def test_the_small_gpt_has_the_state_of_the_pruned_one(layers: int, width: int) -> None:
    shape = GPTConfig(num_layers=layers, width=width, num_heads=width // 32, context=64)
    model = GPT(shape)
    bf16 = torch.bfloat16
    samo.compress_(model, samo.prune(model, 0.9), dtype=bf16, grad_dtype=bf16)
    held = samo.ledger(model, samo.AdamW(model.parameters())).predicted_bytes
    narrow = matching_shape(shape)
    assert narrow.num_layers == layers
    narrower = GPTConfig(num_layers=layers, width=narrow.width - 8, num_heads=1, context=64)
    sizes = [DENSE_BYTES * sum(p.numel() for p in GPT(c).parameters()) for c in (narrower, narrow)]
    assert sizes[0] < held <= sizes[1]


# Text


def test_no_byte_is_read_more_than_four_times() -> None:
    sizes = {"batch": 5, "context": 7, "seed": 0}
    starts_SB = order(300, steps=9, **sizes)
    inputs, targets = windows(torch.arange(300), starts_SB.flatten(), 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.bincount(inputs.flatten()).max() <= 4
    assert torch.equal(starts_SB, order(300, steps=9, **sizes))
    with pytest.raises(DataError, match="more than 4 times; take fewer --steps"):
        order(300, steps=40, **sizes)


def test_text_is_held_back_in_whole_files_or_in_part(tmp_path: Path) -> None:
    assert even(101, count=5, context=10).tolist() == [0, 20, 40, 60, 80]
    assert even(101, count=100, context=10).tolist() == list(range(0, 100, 10))
    for number in range(41):
        (tmp_path / f"{number:02}.py").write_bytes(b"%02d" % number * 10)
    (tmp_path / "40 again.txt").write_bytes(b"40" * 10)
    text = find_text([tmp_path], least=0)
    assert text.valid == b"00" * 10 + b"20" * 10 + b"40" * 10
    assert len(text.train) == 38 * 20
    few = find_text([tmp_path / "01.py", tmp_path / "02.py"], least=0)
    assert few.train == b"01" * 9 + b"0" + b"02" * 9 + b"0"
    assert few.valid == b"12"
    assert few.digest != text.digest
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="has 5 bytes of text in 1 files, and 10,000,000 are"):
        find_text([tmp_path / "a.txt"])
    with pytest.raises(DataError, match=r"there is no text '.*b\.txt'"):
        find_text([tmp_path / "b.txt"])


# Runs and spreads


def fake_row(job: runs.Job, failing: str = "") -> runs.Row:
    if job.contender == failing:
        raise ValueError(f"{failing} cannot\nbe run")
    return {"contender": job.contender, "seed": job.seed, "lr": job.lr}


def test_what_was_done_stays_when_a_run_fails(tmp_path: Path) -> None:
    jobs = [runs.Job(name, 0, 0.1) for name in "abc"]

    def plan(_: object) -> list[runs.Job]:
        return jobs

    said: list[str] = []
    with runs.kept_rows(tmp_path, Settings()) as kept:
        with pytest.raises(RunError, match=r"1 runs failed: b \(seed 0, rate 0.1\): b cannot$"):
            runs.finish(kept, plan, partial(fake_row, failing="b"), device=CPU, say=said.append)
        with (
            pytest.raises(RunError, match="another process writes to"),
            runs.kept_rows(tmp_path, Settings()),
        ):
            pass
    assert [row["contender"] for row in read_lines(tmp_path / "rows.jsonl")] == ["a", "c"]
    with runs.kept_rows(tmp_path, Settings()) as kept:
        assert kept.missing(jobs) == [runs.Job("b", 0, 0.1)]
        runs.finish(kept, plan, fake_row, device=CPU, minutes=-1, say=said.append)
    assert said[-1] == "1 runs are left for the next call: b (seed 0, rate 0.1)"
    with runs.kept_rows(tmp_path, Settings()) as kept:
        runs.finish(kept, plan, fake_row, device=CPU, say=said.append)
    assert [row["contender"] for row in read_lines(tmp_path / "rows.jsonl")] == ["a", "c", "b"]


def test_other_seeds_wait_for_the_best_rate_of_the_first() -> None:
    losses = {0.1: 3.0, 0.3: 2.0, 1.0: 2.5, 3.0: 1.0}
    plan = partial(rates.plan, names=["a", "b"], seeds=[5, 6], lrs=[1.0, 0.1, 3.0, 0.3])
    rows: list[dict[str, Any]] = []
    begun = []
    while jobs := [job for job in plan(rows) if job not in begun]:
        begun.append(jobs[0])
        name, seed, lr = jobs[0]
        loss = losses[lr] if name == "a" else -lr  # b: the more the better
        rows.append({"contender": name, "seed": seed, "lr": lr, "valid_loss": loss})
    assert [job.lr for job in begun if job[:2] == ("a", 5)] == [0.1, 0.3, 1.0]  # 1.0 is worse
    assert [job.lr for job in begun if job[:2] == ("a", 6)] == [0.3]
    assert [job.lr for job in begun if job[:2] == ("b", 5)] == [0.1, 0.3, 1.0, 3.0]
    assert [job.lr for job in begun if job[:2] == ("b", 6)] == [3.0]
    best = rates.best_rows(rows)
    assert {(row["contender"], row["seed"], row["lr"]) for row in best} == {
        *(("a", seed, 0.3) for seed in (5, 6)),
        *(("b", seed, 3.0) for seed in (5, 6)),
    }


def test_differences_are_taken_seed_by_seed() -> None:
    base = [{"seed": seed, "loss": float(seed)} for seed in range(3)]
    rows = [{"seed": seed, "loss": seed + 0.1 + 0.001 * (seed % 2)} for seed in range(3)]
    found = spreads.against(rows, base, "loss")
    assert found is not None
    assert found.text("+.3f") == "+0.100 +- 0.001"
    assert found.is_clear
    assert not spreads.of([row["loss"] for row in base]).is_clear  # 1 +- 1
    assert spreads.against(rows, [{"seed": 7, "loss": 0.0}], "loss") is None
    assert spreads.of([2.0]).text() == "2.000"
    assert not spreads.of([2.0]).is_clear
