"""The figures: what is drawn stands for the numbers, and axes are true."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from samo.report import figures
from samo.report.curves import smooth, spread
from samo.report.memory_bars import bars
from samo.report.runs import Run, read_run, read_runs
from samo.report.theme import DARK, LIGHT, drawing, to_svg
from tests.report.runs import (
    KEPT,
    NUMEL,
    gradual,
    observed,
    remapped,
    stepped,
    write_events,
    write_run,
)


def draw(kind: str, content: Any) -> Any:
    with drawing():
        return getattr(figures, f"{kind}_figure")(content)


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_losses_are_drawn_apart_for_each_phase_and_validations_at_their_steps(
    tmp_path: Path,
) -> None:
    runs = read_runs([write_run(tmp_path)])
    (axes,) = draw("loss", runs).axes
    raw = np.concatenate([axes.lines[i].get_ydata() for i in (0, 2)])
    assert raw.tolist() == [step.loss for step in runs[0].steps]
    assert [line.get_xdata()[0] for line in axes.lines[:4]] == [1, 1, 101, 101]
    assert axes.lines[4].get_xdata().tolist() == [50, 100, 150, 200, 250, 300]
    assert axes.lines[4].get_ydata().tolist() == [e.valid_loss for e in runs[0].evals]
    assert {"pruned to 90 %", "loss, nats per token"} <= set(texts(axes))
    assert any(re.fullmatch(r"notes  2\.\d{3}", text) for text in texts(axes))


def test_the_axis_of_losses_leaves_out_the_first_steps_alone(tmp_path: Path) -> None:
    (axes,) = draw("loss", read_runs([write_run(tmp_path)])).axes
    run = read_run(tmp_path)
    low, high = axes.get_ylim()
    assert high < run.steps[0].loss
    assert all(low < e.valid_loss < high for e in run.evals)
    assert axes.get_xlim() == (0, 300)


def test_throughput_starts_at_0(tmp_path: Path) -> None:
    (axes,) = draw("throughput", read_runs([write_run(tmp_path)])).axes
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 16_850


def test_the_parts_of_a_bar_are_its_bytes(tmp_path: Path) -> None:
    found = bars(read_runs([write_run(tmp_path)]))
    (axes,) = draw("memory", found).axes
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
    parts = len(ends) // len(found)
    assert ends[parts - 1 :: parts] == [bar.total for bar in found]
    assert axes.get_xlim() == (0, max(ends))
    assert "5.82 MB   6.70 B/param" in texts(axes)


def test_densities_are_drawn_over_layers() -> None:
    names = [f"blocks.{i}.{kind}.0.weight" for i in (10, 0, 2) for kind in ("up", "down")]
    sizes = {name: (10 + i, 100) for i, name in enumerate([*names, "head.weight", "1.weight"])}
    (axes,) = draw("density", sizes).axes
    up = axes.lines[0]
    assert (up.get_xdata().tolist(), up.get_ydata().tolist()) == ([0, 2, 10], [0.12, 0.14, 0.1])
    assert {"blocks.*.up.0", "blocks.*.down.0", "head", "*"} <= set(texts(axes))
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize("history", [True, False])
def test_a_cell_stands_for_each_pair_of_masks(tmp_path: Path, history: bool) -> None:
    looks = observed(8, queue=3, history=history)
    run = read_run(write_run(tmp_path, reason="settled", more=looks))
    grid, curve = draw("ticket", run).axes
    cells, agree = (~np.ma.getmaskarray(image.get_array()) for image in grid.images)
    first = [0 if history else max(0, i - 2) for i in range(8)]
    assert np.argwhere(cells).tolist() == [[i, j] for i in range(8) for j in range(first[i], i)]
    assert np.argwhere(agree).tolist() == [[4, 3], [5, 4], [6, 5], [7, 6]]  # 0.1 and below
    (line, _, mark) = curve.lines
    assert line.get_ydata().tolist() == [look.largest for look in looks[2:]]
    assert mark.get_xdata() == [100, 100]
    assert {"threshold 0.1", "drawn at step 100: settled"} <= set(texts(curve))


@pytest.mark.parametrize("count", [1, 2, 500])
def test_few_and_many_looks_are_drawn(tmp_path: Path, count: int) -> None:
    run = read_run(write_events(write_run(tmp_path), observed(count)))
    with drawing():
        assert len(to_svg(draw("ticket", run))) < 300_000


def test_sparsity_is_drawn_from_the_draw_to_the_end(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path, sparsity=0.0, more=gradual())])
    (axes,) = draw("change", runs).axes
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [100, 150, 200, 250, 300]
    expected = [0.0, 1 - 400_000 / NUMEL, 1 - 100_000 / NUMEL, 0.9, 0.9]
    assert line.get_ydata() == pytest.approx(expected, abs=1e-5)
    assert axes.get_ylim() == (0, 1)


def test_replaced_fractions_are_drawn_at_their_steps(tmp_path: Path) -> None:
    moves = [remapped(step, KEPT, KEPT, KEPT // 4) for step in (150, 200)]
    (axes,) = draw("change", read_runs([write_run(tmp_path, more=moves)])).axes
    (points,) = axes.lines
    assert points.get_xdata().tolist() == [150, 200]
    assert points.get_ydata() == pytest.approx([0.25, 0.25], abs=1e-3)


def test_a_long_run_makes_a_small_figure(tmp_path: Path) -> None:
    steps = [stepped(i, 2 + math.sin(i * i) / 9 + (i == 70_001)) for i in range(1, 100_000, 2)]
    run = Run(path=tmp_path, about={}, broken_lines=0, label="a", events=steps)
    with drawing():
        svg = to_svg(draw("loss", [run]))
    assert len(svg) < 400_000


# Look


def test_colours_of_figures_are_variables(tmp_path: Path) -> None:
    with drawing():
        svg = to_svg(draw("loss", read_runs([write_run(tmp_path)])))
    assert not [colour for colour in LIGHT.values() if colour in svg]
    assert "#000000" not in svg  # matplotlib's default, invisible on a dark page
    assert {"run0", "muted"} <= set(re.findall(r"var\(--(\w+)\)", svg)) <= set(LIGHT)
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)  # or one role would be taken for another


# Curves


def test_smoothing_averages_over_what_is_finite() -> None:
    noisy = 2 + np.random.default_rng(0).normal(0, 1, 5000)
    assert np.abs(smooth(noisy, 100)[100:-100] - 2).max() < 0.5 < np.abs(noisy - 2).max()
    line = np.arange(1000.0)
    assert np.allclose(smooth(line, 20)[2:-2], line[2:-2])  # centred, also near the ends
    gap = np.full(1000, 3.0)
    gap[10:20] = gap[400:600] = np.nan
    calm = smooth(gap, 40)
    assert (calm[:300] == 3.0).all()
    assert np.isnan(calm[450:550]).all()
    assert len(smooth(np.empty(0), 5)) == 0


@given(values=st.lists(st.floats(-5, 15), max_size=12), gap=st.floats(0.01, 3))
def test_labels_that_are_spread_do_not_touch(values: list[float], gap: float) -> None:
    places = spread(values, gap, 0.0, 10.0)
    room = min(gap, 10.0 / max(len(values), 1))
    assert all(b - a > room - 1e-9 for a, b in itertools.pairwise(sorted(places)))
    assert all(-1e-9 < place < 10 + 1e-9 for place in places)
    pairs = itertools.permutations(range(len(values)), 2)
    assert all(places[i] < places[j] for i, j in pairs if values[i] < values[j])


def test_labels_far_apart_stay_where_they_are() -> None:
    assert spread([1.0, 9.0, 5.0], 1.0, 0.0, 10.0) == [1.0, 9.0, 5.0]
