"""The page: one file that needs nothing else, safe and whole also for odd runs."""

import html.parser
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

import samo
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.report.page import write_report
from samo.report.theme import LIGHT
from tests.report.runs import (
    fake_masks,
    gradual,
    observed,
    stepped,
    write_events,
    write_run,
)

SAMPLE = "def f(x):\n    return x < 3 & '\u00e9'  # <script>alert(1)</script>"


class Page(html.parser.HTMLParser):
    """What a page holds: its text, its tags with their attributes, and whether they nest."""

    VOID = ("meta", "link")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.pieces: list[str] = []
        self.feed(source)
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.pieces.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]


def report(*runs: Path) -> str:
    out = runs[0].parent / "report.html"
    assert write_report(list(runs), out) == out
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with everything, another with the same masks, a gradual one and a shorter dense one."""
    base = tmp_path_factory.mktemp("runs")
    masks, looks = fake_masks(), observed(9)
    return [
        write_run(
            base / "samo",
            name="compressed",
            masks=masks,
            sample=SAMPLE,
            more=looks,
            reason="settled",
        ),
        write_run(base / "again", name="again", masks=masks, seed=1),
        write_run(base / "gradual", name="gradual", sparsity=0.0, more=gradual()),
        write_run(base / "dense", name="dense", mode="dense", steps=200, end="interrupted"),
    ]


@pytest.fixture(scope="module")
def source(runs: list[Path]) -> str:
    return report(*runs)


def test_the_page_has_its_sections_in_order(source: str) -> None:
    text = Page(source).text
    wanted = [
        "4 runs of a model with 868,352 parameters, 200 to 300 steps.",
        "validation loss",
        "nats per token",
        "compressed holds 5.82 MB, dense training 13.9 MB",
        "dense training",
        "SAMO paper, compressed",
        "compressed, measured",
        "About the same speed",
        "The ticket was drawn at step 100",
        "3 changes of the masks, to 90 % sparsity",
        "Masks of compressed and again",
        "The runs side by side",
        "What the model writes",
        "Settings that differ",
        "How it was measured",
    ]
    places = [text.find(words) for words in wanted]
    assert -1 not in places
    assert places == sorted(places)


def test_the_numbers_of_a_card_are_those_of_the_run(source: str) -> None:
    card = source[source.index("<article") : source.index("</article>")]
    numbers = re.findall(r'<dd class="\w+">([^<]*)</dd>', card)
    assert numbers[2:6] == ["5.82 MB", "6.70 B/param", "58.1 %", "of 13.9 MB"]
    assert math.exp(float(numbers[0])) == pytest.approx(float(numbers[1].split()[1]), rel=0.01)
    assert abs(int(numbers[6].replace(",", "")) - 16_850) < 200
    assert "samo, 90 % sparse, float32, finished" in card


def test_the_page_is_one_file_without_scripts(source: str) -> None:
    page = Page(source)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "img"}
    links = page.values("src") + page.values("href") + page.values("xlink:href")
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\((?!#)|@import|@font-face", source)


def test_what_figures_refer_to_is_there_once(source: str) -> None:
    page = Page(source)
    ids = Counter(page.values("id"))
    assert max(ids.values()) == 1
    wanted = {link[1:] for link in page.values("xlink:href") if link.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]*)\)", source))
    assert wanted
    assert wanted <= set(ids)
    assert len(page.values("aria-label")) == len(re.findall("<svg", source)) == 6


def test_colours_are_those_of_the_style_sheet(source: str) -> None:
    used = set(re.findall(r"var\(--(\w+)\)", source)) - {"font", "mono", "colour"}
    assert used <= set(LIGHT)
    assert source.count("--page: ") == 2  # light and dark


def test_a_sample_is_shown_letter_by_letter(source: str) -> None:
    assert "return x &lt; 3 &amp; &#39;\u00e9&#39;  # &lt;script&gt;" in source


def test_settings_that_differ_are_named(source: str) -> None:
    part = source[source.index("Settings that differ") : source.index("<details>")]
    assert re.findall(r"<tr><th>([^<]+)</th>", part) == ["run.mode", "run.steps", "run.seed"]


def test_equal_runs_give_equal_files_whatever_the_settings_of_matplotlib(
    runs: list[Path], source: str
) -> None:
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.grid": True}):
        before = settings()
        assert report(*runs) == source
        assert settings() == before
    assert not [path.name for path in runs[0].parent.iterdir() if path.name.startswith(".")]


def settings() -> dict[str, Any]:
    # Without the backend, which matplotlib chooses when it is asked for.
    return {name: value for name, value in matplotlib.rcParams.copy().items() if name != "backend"}


# Odd runs


EVIL = '<img src=x onerror=alert(1)>"\'&$x_1$ {{ 7 * 7 }} id="y"\x00\n\u6f22\u5b57'


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    changes = {"command": EVIL, "hardware": {EVIL: EVIL}, "versions": {"samo": EVIL}}
    masks = Masks({EVIL: Mask.from_bool(torch.rand(64, 64) > 0.5)})
    run = write_run(tmp_path, name=EVIL, sample=EVIL, steps=120, changes=changes, masks=masks)
    page = Page(report(run))
    assert not [tag for tag, attrs in page.tags if tag == "img" or "onerror" in attrs]
    assert page.text.count('<img src=x onerror=alert(1)>"\'&$x_1$ {{ 7 * 7 }} id="y"?') > 5


def test_a_name_is_not_taken_for_mathematics(tmp_path: Path) -> None:
    source = report(write_run(tmp_path, name=r"$\frac$", steps=60))
    assert re.search(r">\$\\frac\$  \d\.\d{3}</text>", source)


def test_a_dense_run_has_neither_memory_nor_masks(tmp_path: Path) -> None:
    text = Page(report(write_run(tmp_path, mode="dense", steps=20, eval_every=0))).text
    assert "not measured" in text
    assert "Masks of" not in text
    assert "The training loss is" in text
    assert "not validated yet" in text


@pytest.mark.parametrize("events", [[], [stepped(1)], [stepped(i, math.nan) for i in (1, 2)]])
def test_a_run_of_a_few_odd_steps_is_reported(tmp_path: Path, events: list[Any]) -> None:
    text = Page(report(write_events(write_run(tmp_path), events))).text
    assert "still running, or killed" in text
    assert ("no step was logged" in text) == (not events)
    assert ("2 of 2 logged losses are not finite" in text) == (len(events) == 2)
    assert "nan" not in text.lower().split()


def test_a_failed_run_and_broken_lines_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=5, end="failed")
    with open(folder / "metrics.jsonl", "a") as lines:
        lines.write("{\n{\n")
    assert "2 lines of metrics.jsonl could not be read; it failed." in report(folder)


def test_masks_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=120)
    (run / "masks.safetensors").write_bytes(b"no masks")
    text = Page(report(run)).text
    assert "The masks of notes are not shown: " in text
    assert "is not a mask file" in text


def test_many_runs_share_a_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{i}", name=f"run {i}", steps=20 + i) for i in range(10)]
    other = {"hardware": {"device_name": "other"}, "data": {"fingerprint": "other"}}
    runs[0] = write_run(tmp_path / "0", steps=20, changes=other)
    source = report(*runs)
    assert source.count('class="dashed"') == 2 * 4  # the last four, in two keys
    assert Page(source).values("class").count("card") == 10
    assert "not all use the same hardware" in source
    assert "not all trained on the same data" in source


def test_several_ranks_are_named(tmp_path: Path) -> None:
    ranks = {"ranks": {"pipe": 2, "data": 1}}
    run = write_run(tmp_path, steps=120, rank_bytes=(3_000_000, 2_816_112), changes=ranks)
    text = Page(report(run)).text
    assert "samo, 90 % sparse, float32, 2 ranks: 2 stages, finished" in text
    assert "6.70 B/param, largest rank 3.00 MB" in text
    assert "model state is that of one replica" in text


# Where it cannot be written


def test_a_report_needs_runs_and_an_html_name(tmp_path: Path) -> None:
    with pytest.raises(samo.ConfigError, match="no run to report on"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(samo.ConfigError, match=r"got '.*report\.png'; pass a name that ends in"):
        write_report([tmp_path], tmp_path / "report.png")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/report.html", r"there is no folder '.*nowhere'; create it first"),
        ("folder.html", "it is a folder; pass the name of a file"),
        (f"{'x' * 252}.html", "File name too long; pass a place that can be written to"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(samo.RunError, match=message):
        write_report([write_run(tmp_path / "run", steps=2)], tmp_path / name)
