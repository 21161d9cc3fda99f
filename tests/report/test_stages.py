"""The timeline of a pipeline in the report."""

from pathlib import Path

from samo.report import stages
from samo.report.page import write_report
from samo.report.runs import read_run
from samo.report.theme import drawing
from samo.train.events import Scheduled
from tests.report.runs import write_run

# Two stages, two micro-batches: 12 ms, of which stages compute 2 * 2 * (1 + 2) of 2 * 12.
LINE = Scheduled(
    step=300,
    num_stages=2,
    micro_batches=2,
    stages=[0, 0, 1, 1, 1, 1, 0, 0],
    numbers=[0, 1, 0, 1, 0, 1, 0, 1],
    start_ms=[0, 1, 2, 3, 4, 6, 8, 10],
    end_ms=[1, 2, 3, 4, 6, 8, 10, 12],
)


def test_passes_are_drawn_where_they_are(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", more=[LINE]))
    with drawing():
        (axes,) = stages.timeline_figure(run).axes
    boxes = [bar.get_paths()[0].get_extents() for bar in axes.collections]
    assert [box.x0 for box in boxes] == LINE.start_ms
    assert [box.x1 for box in boxes] == LINE.end_ms
    assert [round((box.y0 + box.y1) / 2) for box in boxes] == LINE.stages
    assert [text.get_text() for text in axes.texts] == [str(n) for n in LINE.numbers]
    assert [bar.get_alpha() for bar in axes.collections] == [0.35] * 4 + [1.0] * 4


def test_a_page_says_how_long_stages_stood_idle(tmp_path: Path) -> None:
    path = write_report([write_run(tmp_path / "a", more=[LINE])], tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert "2 micro-batches passed 2 stages in 12 ms; stages stood idle for 50 %" in text
    without = write_report([write_run(tmp_path / "b")], tmp_path / "other.html")
    assert "stood idle" not in without.read_text(encoding="utf-8")


def test_a_timeline_of_a_stranger_is_drawn_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    wild = {"stages": [7, -1, 0], "numbers": [0], "start_ms": [1e300, 0.0, -1.0], "end_ms": [5.0]}
    line = Scheduled(step=300, num_stages=2, micro_batches=1, **wild)
    run = read_run(write_run(tmp_path / "a", more=[line]))
    assert stages.timeline_finding(run) == "No pass was recorded."
    with drawing():
        assert not stages.timeline_figure(run).axes[0].collections
