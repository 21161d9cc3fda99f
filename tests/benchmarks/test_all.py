"""Benchmarks run at toy size, so that none rots; what they measure is not checked."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from benchmarks import early_bird_intervals, early_bird_rules, large_lm, sparse_vs_dense
from benchmarks.faults import bench as faults, kills, mutations
from benchmarks.layouts import bench as layouts
from benchmarks.pipeline import bench as pipeline, contenders, simulated
from benchmarks.recovery import bench as recovery, figure
from torch import Tensor

from samo.cli.main import main
from tests.benchmarks.calling import call, rows_of
from tests.data.trained_tokenizer import save_trained_tokenizer
from tests.integrations.tiny_lms import tiny_lm
from tests.train.helpers import finished, run

__all__ = ["finished", "run"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_a_simulation_writes_its_rows(out: Path) -> None:
    written = rows_of(simulated.main, out, "--toy", "--rounds", 2)
    assert len(written) == 7
    assert all({"device_name", "versions", "commit", "date"} <= row.keys() for row in written)


@pytest.mark.parametrize("flags", [[], ["--in-python"]])
def test_a_large_model_is_trained_by_command_and_in_python(flags: list[str], out: Path) -> None:
    rows = rows_of(large_lm.main, out, "llama-3-8b", "--toy", *flags, "--peers", "none")
    assert [row["error"] for row in rows] == [None, None, "not installed (No module named 'none')"]
    assert [row["tokens_per_s"] > 0 for row in rows[:2]] == [True, True]


def test_layouts_are_compared_by_what_their_runs_wrote(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        arguments = command[command.index("train") :]
        arguments[arguments.index("--pipe") + 1] = (
            "1"  # one rank, here: that many are tried elsewhere
        )
        arguments[arguments.index("--lr") + 1] = "1e-3" if len(seen) == 0 else "1e-2"
        seen.append(arguments)
        return SimpleNamespace(returncode=main(arguments))

    seen: list[list[str]] = []
    monkeypatch.setattr(layouts, "subprocess", SimpleNamespace(run=run))
    one, other = rows_of(layouts.main, out, "--toy")
    assert (one["layout"], other["layout"]) == ("1x1", "2x2")
    assert len(one["losses"]) == len(other["losses"]) == 4
    apart = [abs(a - b) / b for a, b in zip(other["losses"], one["losses"])]
    assert (one["largest_difference"], other["largest_difference"]) == (0, max(apart))
    assert max(apart) > 0


@pytest.mark.slow
def test_recovery_measures_every_contender_and_draws_them(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be: that is the question. " * 200)
    tiny_lm(vocab_size=300).save_pretrained("tiny")
    save_trained_tokenizer(Path("tiny"))
    given = ["tiny", "--train", "text.txt", "--valid", "text.txt", "--toy"]
    given += ["--methods", "magnitude", "wanda", "--sparsities", "0.5", "0.8"]
    given += ["--contenders", "dense", "unpruned", "samo", "distilled"]
    rows = rows_of(recovery.main, out, *given)
    assert [row["contender"] for row in rows[:2]] == ["dense", "unpruned"]
    assert len(rows) == 2 + 2 * 2 * 3
    assert all(row["ppl"] > 1 for row in rows)
    call(figure.main, out)
    assert "Wanda, with a teacher" in out.with_suffix(".svg").read_text()


def test_rules_and_intervals_of_tickets_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(early_bird_rules, "EVERY", 1)
    monkeypatch.setattr(early_bird_rules, "QUEUE", 2)
    call(early_bird_rules.main, "--steps", 2, "--batch-size", 1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 0.")]
    assert len(rows) == len(early_bird_rules.SPARSITIES)
    for name, value in (("QUEUE", 2), ("INTERVALS", (1, 2)), ("THRESHOLDS", (0.9,))):
        monkeypatch.setattr(early_bird_intervals, name, value)
    call(early_bird_intervals.main, "--steps", 5, "--every", 1, "--batch-size", 1)
    rows = [line for line in capsys.readouterr().out.splitlines() if " steps | " in line]
    assert [row.startswith(("| 1 steps | 2, ", "| 2 steps | 3, ")) for row in rows] == [True, True]


# Pipelines

FIXED: Final = {
    "torch Schedule1F1B": [4, 3, 2, 1],
    "torch Schedule1F1B, one more": [5, 4, 3, 2],
}


@pytest.mark.slow
def test_pipelines_hold_as_many_micro_batches_as_they_say(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # it takes long to load
    monkeypatch.setattr(pipeline, "CASES", {"late": pipeline.Case(1.2, micro_batches=6)})
    rows = rows_of(pipeline.main, out, "--toy", "--rounds", 1)
    printed = capsys.readouterr().out
    assert "deepspeed is not installed; left out" in printed
    assert pipeline.table(rows) in printed
    names = [row["contender"] for row in rows]
    assert names == [*contenders.SAME, *contenders.ONE_MORE]
    for row in rows:
        name, held = row["contender"], [int(number) for number in row["held"].split()]
        if name in FIXED:
            assert held == FIXED[name]
        else:
            limits = [int(number) for number in name.partition("limits ")[2].split()]
            assert all(1 <= number <= limit for number, limit in zip(held, limits, strict=True))


# Sparse products


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(weight: Tensor, x_TD: Tensor) -> Any:
        return lambda: torch.zeros(x_TD.shape[0], weight.shape[0])

    monkeypatch.setitem(sparse_vs_dense.MAKERS, "csr", wrong)
    cpu = torch.device("cpu")
    found = sparse_vs_dense.measure((64,), (64,), 0.9, cpu, 2, lambda _: None)
    reasons = {row.failure for row in found if row.name == "csr"}
    assert reasons == {"wrong result in torch.bfloat16: it is off by 1"}
    blocks = sparse_vs_dense.patterns(640, 0.9, cpu)["bsr 64"].view(10, 64, 10, 64)
    sizes = blocks.count_nonzero(dim=(1, 3))
    assert sorted(set(sizes.flatten().tolist())) == [0, 64 * 64]
    assert int((sizes > 0).sum()) == 10


# Faults

SAID = """\
samo: rank 0: rank 3 stopped (no heartbeat), and because of it: rank 2 ... (rank 3 is stage 1 of 2)
samo: rank 1: rank 0 stopped (no heartbeat) (rank 0 is stage 0 of 2)
samo: rank 2: rank 3 (stage 1 of 2) is gone
samo: rank 3 (stage 1 of 2) was stopped by signal 19, which the others found out; it was killed
"""


def test_who_names_the_failed_rank_is_read_from_the_output() -> None:
    found = faults.named(SAID, 3, 1, 2)
    assert (found["named_by_ranks"], found["named_by_launcher"]) == ([0, 2], True)
    found = faults.named(SAID, 3, 0, 2)  # of another stage
    assert (found["named_by_ranks"], found["named_by_launcher"]) == ([], False)
    found = faults.named(
        "samo: rank 1 ended with code 1, the first of the ranks to fail", 11, None, 1
    )
    assert (found["named_by_ranks"], found["named_by_launcher"]) == ([], False)
    found = faults.named("samo: rank 1 was killed by signal 9, the first", 1, None, 1)
    assert found["named_by_launcher"]


@pytest.mark.long
def test_a_toy_campaign_of_damaged_files_finds_nothing(out: Path) -> None:
    total = rows_of(mutations.main, out, "--toy")[-1]
    assert sum(total[outcome] for outcome in mutations.OUTCOMES) >= 20
    assert not any(total[outcome] for outcome in mutations.BAD)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_is_killed_and_compared(out: Path) -> None:
    killed, compared = rows_of(kills.main, out, "--toy", "--cases", "magnitude")
    assert killed["whole"]
    assert killed["all_gone"]
    assert compared["is_equal"], compared["error"]


def test_differences_and_leftovers_are_seen(finished: Path, run: Path) -> None:
    assert kills.difference(run, finished) == ""
    assert kills.leftovers(run) == set()
    (run / "checkpoints" / "best" / "data-00000000").mkdir()
    (run / ".run.json.1234").touch()
    assert kills.leftovers(run) == {"checkpoints/best/data-00000000", ".run.json.1234"}
    shutil.rmtree(run / "checkpoints" / "best")
    assert kills.difference(run, finished).startswith("checkpoints {'last'} instead of {")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 7, "phase"', '"step": 9, "phase"'))
    assert "'step': 9" in kills.difference(run, finished)
