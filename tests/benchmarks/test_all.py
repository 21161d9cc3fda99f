"""Benchmarks run at toy size, so that none rots; what they measure is not checked."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import early_bird_intervals, early_bird_rules, large_lm, sparse_vs_dense
from benchmarks.faults import bench as faults
from benchmarks.layouts import bench as layouts
from benchmarks.pipeline import simulated
from torch import Tensor

from samo.cli.main import main


def test_a_simulation_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", "--toy", "--rounds", "2", "--out", str(out)])
    simulated.main()
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 7
    assert all({"device_name", "versions", "commit", "date"} <= row.keys() for row in written)


def test_a_large_model_is_trained_by_command_and_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ([], ["--in-python"]):
        out = tmp_path / f"rows{len(flag)}.jsonl"
        given = ["llama-3-8b", "--toy", *flag, "--peers", "none", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["large_lm", *given])
        large_lm.main()
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["error"] for row in rows] == [
            None,
            None,
            "not installed (No module named 'none')",
        ]
        assert [row["tokens_per_s"] > 0 for row in rows[:2]] == [True, True]


def test_layouts_are_compared_by_what_their_runs_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(layouts, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "argv", ["layouts", "--toy", "--out", str(out)])
    layouts.main()
    one, other = (json.loads(line) for line in out.read_text().splitlines())
    assert (one["layout"], other["layout"]) == ("1x1", "2x2")
    assert len(one["losses"]) == len(other["losses"]) == 4
    apart = [abs(a - b) / b for a, b in zip(other["losses"], one["losses"])]
    assert (one["largest_difference"], other["largest_difference"]) == (0, max(apart))
    assert max(apart) > 0


def test_rules_and_intervals_of_tickets_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(early_bird_rules, "EVERY", 1)
    monkeypatch.setattr(early_bird_rules, "QUEUE", 2)
    monkeypatch.setattr(sys, "argv", ["rules", "--steps", "2", "--batch-size", "1"])
    early_bird_rules.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 0.")]
    assert len(rows) == len(early_bird_rules.SPARSITIES)
    for name, value in (("QUEUE", 2), ("INTERVALS", (1, 2)), ("THRESHOLDS", (0.9,))):
        monkeypatch.setattr(early_bird_intervals, name, value)
    arguments = ["--steps", "5", "--every", "1", "--batch-size", "1"]
    monkeypatch.setattr(sys, "argv", ["intervals", *arguments])
    early_bird_intervals.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if " steps | " in line]
    assert [row.startswith(("| 1 steps | 2, ", "| 2 steps | 3, ")) for row in rows] == [True, True]


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
