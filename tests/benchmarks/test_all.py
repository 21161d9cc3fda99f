"""Every benchmark runs at toy size, so that none rots; what it measures is not looked at here.

That of pipelines is in test_pipeline_bench.py.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import early_bird_intervals, early_bird_rules
from benchmarks.cpu_kernels import bench as cpu_kernels
from benchmarks.cpu_step import bench as cpu_step
from benchmarks.faults import bench as faults
from benchmarks.layouts import bench as layouts
from benchmarks.pipeline import simulated
from benchmarks.streamed import bench as streamed, page
from benchmarks.streamed.frontier import draw
from benchmarks.streamed.lines import LINES

from samo import cli
from samo.bench.settings import check, contenders


# torch.compile imports deprecated parts of torch, and the peers warn as they are imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("bench", "rows"),
    [
        (cpu_step, 3),
        (cpu_kernels, 39),
        (simulated, 7),
    ],
    ids=["cpu_step", "cpu_kernels", "simulated"],
)
def test_it_runs_and_writes_its_rows(
    bench: Any, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", "--toy", "--rounds", "2", "--out", str(out)])
    # Peers and compilers take a minute to load; the loops around them are what is tried here.
    for name in ("torchao.optim", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    bench.main()
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == rows
    assert all({"cpu", "torch", "commit", "date"} <= row.keys() for row in written)


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
        return SimpleNamespace(returncode=cli.main(arguments))

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


def test_the_rules_of_tickets_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(early_bird_rules, "EVERY", 1)
    monkeypatch.setattr(early_bird_rules, "QUEUE", 2)
    monkeypatch.setattr(sys, "argv", ["rules", "--steps", "2", "--batch-size", "1"])
    early_bird_rules.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 0.")]
    assert len(rows) == len(early_bird_rules.SPARSITIES)


def test_the_intervals_of_tickets_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("QUEUE", 2), ("INTERVALS", (1, 2)), ("THRESHOLDS", (0.9,))):
        monkeypatch.setattr(early_bird_intervals, name, value)
    arguments = ["--steps", "5", "--every", "1", "--batch-size", "1"]
    monkeypatch.setattr(sys, "argv", ["intervals", *arguments])
    early_bird_intervals.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if " steps | " in line]
    assert [row.startswith(("| 1 steps | 2, ", "| 2 steps | 3, ")) for row in rows] == [True, True]


def test_a_ticket_settles_when_all_distances_in_its_queue_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early_bird_intervals, "QUEUE", 3)
    rows = [[], [0.3], [0.3, 0.1], [0.3, 0.2, 0.1], [0.5, 0.2, 0.1, 0.1]]
    steps = [10, 20, 30, 40, 50]
    describe = early_bird_intervals.describe
    assert describe(steps, rows, 1, 0.2) == "40, 10%"
    assert describe(steps, rows, 1, 0.1) == "50, 0%"
    assert describe(steps, rows, 2, 0.2) == "never"


# Streamed and compiled weights


def row_of(name: str, ms: float, gb: float, line: str = "frontier") -> dict[str, Any]:
    figures = {
        "over_masked": ms / 317,
        "in_a_row_ms": ms,
        "peak_bytes": gb * 1e9,
        "peak_over_masked": gb / 56.7,
        "state_bytes_per_param": 3.5,
        "warm_up_s": 1.5,
        "compilations": 2,
    }
    return {
        "line": line,
        "name": name,
        "parameters": {"shape": "gpt3-2.7b", "batch_size": 8, "context": 1024, "sparsity": 0.9},
        **{"median": ms, "p20": ms, "p80": ms, "figures": figures, "failure": None},
        **{"device_name": "a GPU", "versions": {"torch": "2.11"}, "date": "today", "commit": "c"},
    }


def test_every_line_can_be_measured_and_its_goals_are_for_its_contenders() -> None:
    for line in LINES.values():
        check(line.config)
        assert set(line.goals) <= set(contenders(line.config))
        assert "masked" in contenders(line.config) or not line.goals


def test_lines_are_measured_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        seen.append(command[command.index("bench") :])
        cli.main(seen[-1])

    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(streamed, "subprocess", SimpleNamespace(run=run))
    arguments = ["--toy", "--only", "masked", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", "eager", "13b", *arguments])
    streamed.main()
    assert [command[command.index("--shape") + 1] for command in seen] == ["gpt3-2.7b", "gpt3-13b"]
    assert [(row["line"], row["name"]) for row in page.read_rows(out)] == [
        ("eager", "masked"),
        ("13b", "masked"),
    ]
    assert "| 13B, 8 x 1,024, eager | masked | " in capsys.readouterr().out


def test_what_was_measured_stays_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(0.0, 1.0)

    def run(command: list[str], *, timeout: float) -> None:
        assert timeout == 1.0  # of 2 s one is gone
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        (folder / "rows.jsonl").write_text(json.dumps(row_of("masked", 317, 56.7)) + "\n")
        raise subprocess.TimeoutExpired(command, timeout)

    out = tmp_path / "rows.jsonl"
    stopped = subprocess.TimeoutExpired
    monkeypatch.setattr(streamed, "subprocess", SimpleNamespace(run=run, TimeoutExpired=stopped))
    monkeypatch.setattr(streamed, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    arguments = ["eager", "13b", "--seconds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    streamed.main()
    assert [row["name"] for row in page.read_rows(out)] == ["masked"]
    assert "no time for 13b" in capsys.readouterr().out


def test_later_rows_stand_in_place_of_earlier_ones(tmp_path: Path) -> None:
    first = [row_of("streamed", 300, 8, "eager"), row_of("masked", 317, 56.7, "eager")]
    second = [row_of("samo", 20, 1, "graphs-125m"), row_of("streamed", 400, 8, "eager")]
    rows = page.merge([second[:1], first, second[1:]])
    found = [(row["line"], row["name"], row["median"]) for row in rows]
    assert found == [
        ("eager", "streamed", 400),
        ("eager", "masked", 317),
        ("graphs-125m", "samo", 20),
    ]
    page.write(tmp_path, rows)
    text = (tmp_path / "README.md").read_text()
    assert "| streamed | 400 | 400-400 | 1.262 (0.96) | 400 | 8.00 | 0.141 (0.18) |" in text
    assert "samo bench step --repeats 9 --shape gpt3-2.7b" in text
    assert "frontier.png" not in text  # none of its rows


@pytest.mark.parametrize("flat", [False, True], ids=["as it is", "all alike"])
def test_the_frontier_names_every_contender_and_no_names_touch(flat: bool) -> None:
    measured = {
        **{"masked": (317, 56.7), "autocast": (345, 52.0), "samo": (292, 15.0)},
        **{"lean": (294, 11.0), "streamed": (305, 8.3), "streamed-lean": (308, 5.6)},
        **{"budget-25%": (302, 10.0), "budget-50%": (299, 11.6), "budget-75%": (296, 13.3)},
        **{"budget-25%-lean": (304, 7.0), "budget-50%-lean": (300, 8.4)},
        **{"budget-75%-lean": (297, 9.7), "flashoptim": (310, 20.8)},
        **{"flashoptim-release": (306, 17.6)},
    }
    rows = [
        row_of(name, 300 if flat else ms, 5 + gb / 10 if flat else gb)
        for name, (ms, gb) in measured.items()
    ]
    figure = draw(rows)
    assert figure is not None
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()
    boxes = {text: text.get_window_extent(renderer) for text in axes.texts}
    assert len(boxes) == len(measured)
    for one, other in itertools.combinations(boxes, 2):
        names = (one.get_text(), other.get_text())
        assert not boxes[one].overlaps(boxes[other]), names
    dots = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    for x, y in itertools.chain(*dots):
        assert not any(box.contains(x, y) for box in boxes.values())


SAID = """samo: rank 0: rank 3 stopped (no heartbeat), and because of it: rank 2 ... (rank 3 is stage 1 of 2)
samo: rank 1: rank 0 stopped (no heartbeat) (rank 0 is stage 0 of 2)
samo: rank 2: rank 3 (stage 1 of 2) is gone
samo: rank 3 (stage 1 of 2) was stopped by signal 19, which the others found out; it was killed
"""


def test_who_names_the_rank_that_fell_is_read_from_what_all_said() -> None:
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
