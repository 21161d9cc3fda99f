"""Masks in time on the report's page: tickets that settled or not, masks that changed."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch, Rectangle

from samo.cli.main import main
from samo.report import mask_figures
from samo.report.figures import NARROW, WIDE, Size
from samo.report.findings import entries, summary
from samo.report.mask_course import change_finding, ticket_finding
from samo.report.mask_events import square
from samo.report.mask_figures import change_figure, ticket_figure
from samo.report.page import write_report
from samo.report.poster import poster
from samo.report.runs import Run, read_run
from samo.report.theme import LIGHT, drawing, to_svg
from tests.report.test_page import Page
from tests.train.runs import write_run

NUMEL = 786_432
KEPT = 78_643


def add_lines(run: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Put events among the others of a run, in the order of their steps."""
    file = run / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    both = sorted([*found, *lines], key=lambda line: line["step"])  # keeps the order of equals
    file.write_text("".join(json.dumps(line) + "\n" for line in both))
    return run


def observed(count: int, *, queue: int = 5, history: bool = True) -> list[dict[str, Any]]:
    """Return looks every 10 steps, whose masks are the closer the later they are."""
    lines = []
    for i in range(count):
        row = [0.02 + (i - j) * 0.4 / (i + 1) for j in range(i)]
        about = {"distances": row if history else row[-(queue - 1) :], "threshold": 0.1}
        about |= {"largest": max(row[-(queue - 1) :], default=None), "queue": queue}
        lines.append({"event": "observe", "step": 10 * (i + 1), **about})
    return lines


def ticket_run(path: Path, *, reason: str = "settled", **settings: Any) -> Path:
    looks = observed(settings.pop("count", 10), **settings)
    run = write_run(path, prune_at=100)
    text = (run / "metrics.jsonl").read_text()
    pruned = f'"event": "prune", "reason": "{reason}"'
    (run / "metrics.jsonl").write_text(text.replace('"event": "prune"', pruned))
    return add_lines(run, looks)


def changed(steps: Iterable[int], kept: Iterable[int], grown: int = 0) -> list[dict[str, Any]]:
    lines, before = [], KEPT if grown else NUMEL
    for step, now in zip(steps, kept):
        sizes = {"kept": now, "numel": NUMEL, "sparsity": 1 - now / NUMEL}
        lines.append(
            {
                "event": "remap",
                "step": step,
                **sizes,
                "grown": grown,
                "dropped": before + grown - now,
            }
        )
        before = now
    return lines


@pytest.fixture
def gradual(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "gradual", prune_at=100, sparsity=0.0)
    return add_lines(run, changed((150, 200, 250), (400_000, 100_000, KEPT)))


@pytest.fixture
def moving(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "rigl", name="rigl", prune_at=1)
    return add_lines(run, changed((100, 200), (KEPT, KEPT), grown=KEPT // 4))


def one(path: Path) -> Run:
    return read_run(path)


# What is read


def test_distances_are_read_and_put_where_they_belong(tmp_path: Path) -> None:
    run = one(ticket_run(tmp_path / "run", count=4, queue=3))
    assert [seen.step for seen in run.observations] == [10, 20, 30, 40]
    cells = square(run.observations)
    for i, line in enumerate(observed(4)):
        assert cells[i][:i] == line["distances"]
        assert cells[i][i:] == [None] * (4 - i)
    band = one(ticket_run(tmp_path / "band", count=4, queue=3, history=False))
    assert square(band.observations)[3] == [None, *observed(4)[3]["distances"][1:], None]


def test_a_queue_that_is_not_full_has_not_settled(tmp_path: Path) -> None:
    looks = one(ticket_run(tmp_path / "run", count=3, queue=3)).observations
    assert [look.has_settled for look in looks] == [False, False, False]
    close = [
        {**line, "distances": [0.05] * len(line["distances"])} for line in observed(4, queue=3)
    ]
    run = one(add_lines(write_run(tmp_path / "close", prune_at=100), close))
    assert [look.has_settled for look in run.observations] == [False, False, True, True]


def test_what_is_kept_is_what_the_last_change_left(gradual: Path, moving: Path) -> None:
    run = one(gradual)
    assert run.prune is not None
    assert (run.prune.step, run.prune.kept) == (100, KEPT)
    assert run.prune.sparsity == pytest.approx(0.9, abs=1e-5)
    assert run.is_pruned_in_steps
    assert [change.dropped for change in run.changes] == pytest.approx(
        [1 - 400_000 / NUMEL, 0.75, 1 - KEPT / 100_000]
    )
    assert not one(moving).is_pruned_in_steps
    assert [change.replaced for change in one(moving).changes] == pytest.approx(
        [0.25, 0.25], abs=1e-3
    )


@pytest.mark.parametrize(
    "line",
    [
        {"event": "observe", "step": 5},
        {"event": "observe", "step": 5, "queue": 1, "threshold": 0.1, "distances": []},
        {"event": "observe", "step": 5, "queue": 5, "threshold": None, "distances": [0.1]},
        {"event": "remap", "step": 150, "kept": "many", "numel": 10},
        {"event": "remap", "step": 1, "kept": 5, "numel": 10},  # before anything was drawn
    ],
)
def test_lines_about_masks_that_make_no_sense_are_passed_over(
    tmp_path: Path, line: dict[str, Any]
) -> None:
    run = one(add_lines(write_run(tmp_path / "run", prune_at=100), [line]))
    assert not run.observations
    assert not run.changes
    assert run.prune is not None


def test_more_distances_than_looks_do_not_matter(tmp_path: Path) -> None:
    looks = [{**line, "distances": [0.5] * 9} for line in observed(3)]
    run = one(add_lines(write_run(tmp_path / "run", prune_at=100), looks))
    assert square(run.observations) == [[None] * 3, [0.5, None, None], [0.5, 0.5, None]]


# What is said


def test_the_finding_says_when_and_why_the_ticket_was_drawn(tmp_path: Path) -> None:
    settled = one(ticket_run(tmp_path / "a"))
    largest = max(settled.observations[-1].recent)
    assert ticket_finding(settled) == (
        f"The ticket was drawn at step 100: the last 5 masks agree, distance {largest:.3f} at most, "
        "threshold 0.1"
    )
    limit = one(ticket_run(tmp_path / "b", reason="limit"))
    assert ticket_finding(limit) == (
        f"The ticket was drawn at step 100, the limit: masks had not settled, distance {largest:.3f}, "
        "threshold 0.1"
    )


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "one look so far, threshold 0.1"), (2, "distance 0.220, threshold 0.1")],
)
def test_a_run_that_has_not_drawn_yet_says_how_far_it_is(
    tmp_path: Path, count: int, words: str
) -> None:
    run = write_run(tmp_path / "run", steps=30, prune_at=100, end=None)
    found = one(add_lines(run, observed(count)))
    assert ticket_finding(found) == f"Masks have not settled so far: {words}"
    for size in (WIDE, NARROW):
        with drawing():
            assert "<svg" in to_svg(ticket_figure(found, size), "label", "name")


def test_the_findings_say_how_masks_changed(gradual: Path, moving: Path) -> None:
    shown = entries([one(gradual)])
    assert change_finding(shown) == "3 changes of the masks, to 90 % sparsity at step 250"
    assert "pruned to 90 % sparsity from step 100 to 250" in summary(shown)
    assert change_finding(entries([one(moving)])) == (
        "2 changes of the masks replaced 25 % of the kept weights at first and 25 % at step 200"
    )
    both = entries([one(moving), one(gradual)])
    assert change_finding(both).startswith("rigl: 2 changes")


def test_a_single_change_is_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", prune_at=1)
    add_lines(run, changed((100,), (KEPT,), grown=KEPT // 4))
    finding = change_finding(entries([one(run)]))
    assert finding == "1 change of the masks replaced 25 % of the kept weights"


# What is drawn


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_a_cell_stands_for_each_pair_and_a_frame_around_those_that_decided(
    tmp_path: Path, size: Size
) -> None:
    run = one(ticket_run(tmp_path / "run", count=8))
    with drawing():
        grid, curve = ticket_figure(run, size).axes
    cells = [patch for patch in grid.patches if isinstance(patch, PathPatch)]
    rectangle = 5  # corners of a closed path
    corners = [len(patch.get_path().vertices) for patch in cells]
    assert sum(corners) == rectangle * 8 * 7 // 2
    close = len([v for look in run.observations for v in look.distances if v <= 0.1])
    (green,) = [p for p in cells if colour(p) == LIGHT[mask_figures.AGREE]]
    assert len(green.get_path().vertices) // rectangle == close > 0
    (frame,) = [patch for patch in grid.patches if isinstance(patch, Rectangle)]
    assert (frame.get_x(), frame.get_width(), frame.get_height()) == (2.5, 4, 1)
    assert frame.get_y() == 6.5
    texts = [text.get_text() for text in curve.texts]
    assert "threshold 0.1" in texts
    assert "drawn at step 100: settled" in texts


def colour(patch: PathPatch) -> str:
    return to_hex(patch.get_facecolor())


def test_many_looks_are_thinned_out_but_not_the_last_queue(tmp_path: Path) -> None:
    looks = one(ticket_run(tmp_path / "run", count=300)).observations
    taken = mask_figures._thinned(looks)
    assert len(taken) <= 64
    assert taken[-5:] == looks[-5:]
    assert [look.step for look in taken] == sorted({look.step for look in taken})
    band = one(ticket_run(tmp_path / "band", count=300, history=False)).observations
    assert mask_figures._thinned(band) == list(band)[-64:]


def test_sparsity_is_drawn_from_the_draw_to_the_end(gradual: Path) -> None:
    with drawing():
        (axes,) = change_figure(entries([one(gradual)]), WIDE).axes
    (line,) = axes.lines
    assert list(line.get_xdata()) == [100, 150, 200, 250, 300]
    expected = [0.0, 1 - 400_000 / NUMEL, 1 - 100_000 / NUMEL, 0.9, 0.9]
    assert list(line.get_ydata()) == pytest.approx(expected, abs=1e-5)


def test_shares_of_replaced_weights_are_drawn_at_their_steps(moving: Path) -> None:
    with drawing():
        (axes,) = change_figure(entries([one(moving)]), NARROW).axes
    (points,) = axes.lines
    assert list(points.get_xdata()) == [100, 200]
    assert list(points.get_ydata()) == pytest.approx([0.25, 0.25], abs=1e-3)


# The page


def page_of(tmp_path: Path, *runs: Path) -> Page:
    out = tmp_path / "report.html"
    write_report(list(runs), out)
    return Page(out.read_text(encoding="utf-8"))


def test_the_page_shows_ticket_and_changes(tmp_path: Path, gradual: Path, moving: Path) -> None:
    samo, lean = (ticket_run(tmp_path / name) for name in ("samo", "lean"))
    page = page_of(tmp_path, samo, lean, gradual, moving)
    assert page.text.count("The ticket was drawn at step 100") == 1  # both saw the same
    assert "Early-Bird ticket of notes (samo) and notes (lean)" in page.text
    assert page.text.count("Changing masks") == 2
    labels = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert len(labels) == len([label for label in labels if label]) == 2 * 6


def test_figures_say_whether_all_is_pruned_at_once(
    tmp_path: Path, gradual: Path, moving: Path
) -> None:
    assert "pruned from here on, to 90 % sparsity" in page_of(tmp_path, gradual).text
    assert "pruned to 90 % sparsity" in page_of(tmp_path, ticket_run(tmp_path / "run")).text
    assert "from here on" not in page_of(tmp_path, moving, gradual).text  # the first is not gradual


def test_a_run_whose_masks_were_drawn_once_has_none_of_it(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "run"))
    assert "Early-Bird" not in page.text
    assert "Changing masks" not in page.text


def test_a_map_of_many_looks_makes_no_large_page(tmp_path: Path) -> None:
    run = ticket_run(tmp_path / "run", count=500)
    page_of(tmp_path, run)
    assert (tmp_path / "report.html").stat().st_size < 1_500_000


def test_masks_without_history_say_so(tmp_path: Path) -> None:
    page = page_of(tmp_path, ticket_run(tmp_path / "run", history=False))
    assert "Masks that were not in the queue together were not compared" in page.text


def test_masks_that_all_agree_are_as_far_apart_as_they_are(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", prune_at=100)
    looks = [line | {"distances": [0.081] * len(line["distances"])} for line in observed(6)]
    with drawing():
        grid, _ = ticket_figure(one(add_lines(run, looks)), WIDE).axes
    assert any("furthest apart: 0.081" in text.get_text() for text in grid.texts)


@pytest.mark.parametrize(("threshold", "place"), [(0.001, "bottom"), (0.1, "top")])
def test_the_name_of_a_low_threshold_stands_above_its_line(
    tmp_path: Path, threshold: float, place: str
) -> None:
    run = write_run(tmp_path / "run", prune_at=100)
    looks = [line | {"threshold": threshold} for line in observed(6)]
    with drawing():
        _, curve = ticket_figure(one(add_lines(run, looks)), WIDE).axes
    (label,) = [text for text in curve.texts if text.get_text().startswith("threshold")]
    assert label.get_verticalalignment() == place


def test_the_picture_beside_the_page_names_the_ticket(tmp_path: Path) -> None:
    with drawing():
        drawn = poster(entries([one(ticket_run(tmp_path / "run"))]))
    texts = [text.get_text() for axes in drawn.axes for text in axes.texts]
    assert "ticket drawn, pruned to 90 % sparsity" in texts


def test_a_run_pruned_in_steps_says_when_it_was_as_sparse(
    gradual: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(gradual)]) == 0
    looked = " ".join(capsys.readouterr().out.split())
    assert "90 % of 786,432 weights, pruned from step 100 to 250" in looked
