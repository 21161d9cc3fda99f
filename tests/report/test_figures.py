"""The figures: curves and bars have the right numbers, and axes do not mislead."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samo.report import figures, findings
from samo.report.figures import spread
from samo.report.page import write_report
from samo.report.runs import Run, read_run, read_runs
from samo.report.theme import DARK, LIGHT, drawing, to_svg
from samo.train.events import Event, Scheduled
from tests.report.runs import evaluated, observed, pruned, stepped, write_run


def draw(kind: str, content: Any) -> Any:
    with drawing():
        return getattr(figures, f"{kind}_figure")(content)


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_losses_are_averaged_within_each_phase(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path)])
    (axes,) = draw("loss", [run]).axes
    raw, means = axes.lines[0:4:2], axes.lines[1:4:2]
    assert np.concatenate([line.get_ydata() for line in raw]).tolist() == [
        step.loss for step in run.steps
    ]
    for phase, mean, (first, last) in zip(run.phases, means, [(1, 100), (101, 300)]):
        assert mean.get_xdata()[[0, -1]] == pytest.approx([first + 2.5, last - 2.5])  # windows of 6
        expected = [sum(s.loss for s in part) / 6 for part in (phase[:6], phase[-6:])]
        assert mean.get_ydata()[[0, -1]] == pytest.approx(expected)
    assert axes.lines[4].get_xdata().tolist() == [50, 100, 150, 200, 250, 300]
    assert axes.lines[4].get_ydata().tolist() == [e.valid_loss for e in run.evals]
    assert {"pruned to 90 %", "loss, nats per token"} <= set(texts(axes))
    assert any(re.fullmatch(r"notes  2\.\d{3}", text) for text in texts(axes))
    low, high = axes.get_ylim()
    assert high < run.steps[0].loss, "the first steps do not stretch the axis"
    assert all(low < e.valid_loss < high for e in run.evals)
    assert axes.get_xlim() == (0, 300)


def test_every_validation_is_drawn_at_its_step_and_loss(tmp_path: Path) -> None:
    losses = {0: 3.38, 50: 0.97, 100: 0.9, 150: math.inf, 200: 0.86}
    events: list[Event] = [stepped(step, 0.9 + 0.1 * (step % 3)) for step in range(1, 201)]
    before = pruned(0), evaluated(0, losses.pop(0))
    events += [evaluated(step, loss) for step, loss in losses.items()]
    folder = write_run(tmp_path, steps=0, more=[*before, *events], end=None)
    (run,) = read_runs([folder])
    figure = draw("loss", [run])
    (axes,) = figure.axes
    with drawing():
        svg = to_svg(figure)
    finite = {0: 3.38, 50: 0.97, 100: 0.9, 200: 0.86}
    places = axes.transData.transform([*finite.items()])
    expected = [(x, figure.bbox.height - y) for x, y in places]
    drawn = re.findall(
        r'<use xlink:href="#[^"]*" x="([-\d.]+)" y="([-\d.]+)" style="[^"]*page', svg
    )
    assert [tuple(map(float, at)) for at in drawn] == [pytest.approx(at) for at in expected]
    inside = axes.get_window_extent()
    assert all(inside.contains(x, y) for x, y in places)


@pytest.mark.parametrize(("low", "high"), [(1.9, 2.8), (2.0, 2.2), (0.3, 6.1), (1.9e6, 2.8e6)])
def test_labels_of_the_axis_are_where_their_numbers_are(low: float, high: float) -> None:
    steps = [stepped(i, low + (high - low) * (i % 40) / 39) for i in range(1, 400)]
    with drawing():
        figure = draw("loss", [Run(Path("a"), {}, steps)])
        svg = to_svg(figure)
    ticks = re.findall(r'text-anchor: end;.* y="([\d.]+)".*>([\d.e+]+)</text>', svg)
    y, values = np.array(ticks, dtype=float).T
    assert len(y) >= 4
    (axes,) = figure.axes
    places = [axes.transData.transform((0, value))[1] for value in values]
    assert np.ptp(y + places) < 0.01  # SVG counts from the top


def test_losses_over_bytes_of_a_sweep_are_drawn_where_they_are(tmp_path: Path) -> None:
    sweep = [write_run(tmp_path / f"{p}", name=f"r{p}", sparsity=p) for p in (0.5, 0.8, 0.9)]
    runs = read_runs(sweep)
    points = findings.tradeoff(runs)
    (axes,) = draw("tradeoff", points).axes
    found = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines]
    assert found == [(held, loss) for held, loss, _ in points]
    assert [run.label for _, _, run in points] == ["r0.9", "r0.8", "r0.5"]
    assert findings.tradeoff_finding(runs).startswith("r0.9 holds 46.4 % less than r0.5")
    assert not findings.tradeoff(runs[:2])


def test_the_parts_of_a_bar_are_its_bytes(tmp_path: Path) -> None:
    found = findings.bars(read_runs([write_run(tmp_path)]))
    (axes,) = draw("memory", found).axes
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
    parts = len(ends) // len(found)
    assert ends[parts - 1 :: parts] == [bar.total for bar in found]
    assert axes.get_xlim() == (0, max(ends))
    assert "5.82 MB   6.70 B/param" in texts(axes)


def test_early_bird_distances_are_drawn_up_to_pruning(tmp_path: Path) -> None:
    looks = observed(8, queue=3)
    run = read_run(write_run(tmp_path / "a", reason="settled", more=looks))
    (axes,) = draw("ticket", run).axes
    line, _, mark = axes.lines
    assert line.get_xdata().tolist() == [look.step for look in looks[1:]]
    assert line.get_ydata().tolist() == [look.largest for look in looks[1:]]
    assert mark.get_xdata() == [100, 100]
    assert {"threshold 0.1", "pruned to 90 %"} <= set(texts(axes))
    assert axes.get_xlim() == (0, 104)


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
    assert run.timeline is not None
    (axes,) = draw("timeline", run.timeline).axes
    boxes = [bar.get_paths()[0].get_extents() for bar in axes.collections]
    assert [box.x0 for box in boxes] == LINE.start_ms
    assert [box.x1 for box in boxes] == LINE.end_ms
    assert [round((box.y0 + box.y1) / 2) for box in boxes] == LINE.stages
    assert texts(axes) == [str(n) for n in LINE.numbers]
    assert [bar.get_alpha() for bar in axes.collections] == [0.35] * 4 + [1.0] * 4
    found = "2 micro-batches passed 2 stages in 12 ms; stages stood idle for 50 % of that time."
    assert findings.timeline_finding(run.timeline) == found
    assert found in write_report([tmp_path / "a"], tmp_path / "report.html").read_text()


def test_a_timeline_of_a_stranger_is_left_out_where_it_makes_no_sense(tmp_path: Path) -> None:
    wild = {"stages": [7, -1, 0], "numbers": [0] * 3, "start_ms": [1e300, 0.0, -1.0]}
    line = Scheduled(step=300, num_stages=2, micro_batches=1, end_ms=[5.0] * 3, **wild)
    assert read_run(write_run(tmp_path / "a", more=[line])).timeline is None


def test_a_long_run_makes_a_small_figure_in_colours_of_the_page() -> None:
    steps = [stepped(i, 2 + math.sin(i * i) / 9 + (i == 70_001)) for i in range(1, 100_000, 2)]
    with drawing():
        svg = to_svg(draw("loss", [Run(Path("a"), {}, steps)]))
    assert len(svg) < 400_000
    assert not [colour for colour in LIGHT.values() if colour in svg]
    assert "#000000" not in svg  # matplotlib's default, invisible on a dark page
    assert {"run0", "muted"} <= set(re.findall(r"var\(--(\w+)\)", svg)) <= set(LIGHT)
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)  # or one role would be taken for another


def test_labels_that_would_touch_are_moved_apart() -> None:
    assert spread([5.0, 5.0, 9.0, 10.0], gap=2.0, low=0.0, high=10.0) == [4.0, 6.0, 8.0, 10.0]
    assert spread([-5.0, 15.0, 3.0], gap=9.0, low=0.0, high=9.0) == [0.0, 9.0, 3.0]
