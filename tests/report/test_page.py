"""The page: one file that needs nothing else, safe and whole also for odd runs."""

import html.parser
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import samo
from samo.report.page import write_report
from samo.report.theme import LIGHT
from tests.report.runs import gradual, observed, stepped, write_events, write_run

SAMPLE = "def f(x):\n    return x < 3 & '\u00e9'  # <script>alert(1)</script>"


class Page(html.parser.HTMLParser):
    """The text of a page and its tags; fails if they do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open += [] if tag in ("meta", "link") else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}" if self.open and self.open[-1] != "style" else ""

    def values(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]


def report(*runs: Path) -> str:
    out = runs[0].parent / "report.html"
    assert write_report(list(runs), out) == out
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with everything, a gradual one and a shorter dense one."""
    base = tmp_path_factory.mktemp("runs")
    more = {"sample": SAMPLE, "more": observed(9), "reason": "settled"}
    return [
        write_run(base / "samo", name="compressed", seed=1, **more),
        write_run(base / "gradual", name="gradual", sparsity=0.0, more=gradual()),
        write_run(base / "dense", name="dense", mode="dense", steps=200, end="interrupted"),
    ]


@pytest.fixture(scope="module")
def source(runs: list[Path]) -> str:
    return report(*runs)


def test_the_page_has_its_sections_in_order(source: str) -> None:
    text = Page(source).text
    wanted = [
        "3 runs of a model with 868,352 parameters, 200 to 300 steps.",
        "nats per token",
        "compressed holds 5.82 MB, dense training 13.9 MB",
        "SAMO paper, compressed",
        "compressed, measured",
        "Masks settled at step 100",
        "The runs side by side",
        "Masks were pruned further 3 times, to 90 % sparsity",
        "How the model continues a text",
        "Settings that differ",
        "How it was measured",
    ]
    places = [text.find(words) for words in wanted]
    assert -1 not in places
    assert places == sorted(places)


def test_a_card_has_the_numbers_of_its_run(source: str) -> None:
    card = source[source.index("<article") : source.index("</article>")]
    numbers = re.findall(r'<dd class="\w+">([^<]*)</dd>', card)
    assert numbers[2:6] == ["5.82 MB", "6.70 B/param", "58.1 %", "of 13.9 MB"]
    assert numbers[6] == "16,850"
    assert "samo, 90 % sparse, float32, finished" in card


def test_the_page_is_one_file_without_scripts(source: str) -> None:
    page = Page(source)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "img"}
    links = page.values("src") + page.values("href") + page.values("xlink:href")
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\((?!#)|@import|@font-face", source)
    assert "return x &lt; 3 &amp; &#39;\u00e9&#39;  # &lt;script&gt;" in source  # the sample


def test_figures_refer_to_ids_and_colours_of_the_page(source: str) -> None:
    page = Page(source)
    ids = Counter(page.values("id"))
    assert max(ids.values()) == 1
    wanted = {link[1:] for link in page.values("xlink:href") if link.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]*)\)", source))
    assert wanted
    assert wanted <= set(ids)
    assert len(page.values("aria-label")) == len(re.findall("<svg", source)) == 4
    used = set(re.findall(r"var\(--(\w+)\)", source)) - {"font", "mono", "colour"}
    assert used <= set(LIGHT)
    assert source.count("--page: ") == 2  # light and dark
    settings = source[source.index("Settings that differ") : source.index("<details>")]
    assert re.findall(r"<tr><th>([^<]+)</th>", settings) == ["run.mode", "run.steps", "run.seed"]


def test_equal_runs_give_equal_files_whatever_the_settings_of_matplotlib(
    runs: list[Path], source: str
) -> None:
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.grid": True}):
        assert report(*runs) == source
        assert matplotlib.rcParams["font.size"] == 30
    assert not [path.name for path in runs[0].parent.iterdir() if path.name.startswith(".")]


EVIL = '<img src=x onerror=alert(1)>"\'&$x_1$ {{ 7 * 7 }} id="y"\x00\n\u6f22\u5b57'


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    changes = {"command": EVIL, "hardware": {EVIL: EVIL}, "versions": {"samo": EVIL}}
    run = write_run(tmp_path, name=EVIL, sample=EVIL, steps=120, changes=changes)
    page = Page(report(run))
    assert "$x_1$" in page.text  # not mathematics
    assert not [tag for tag, attrs in page.tags if tag == "img" or "onerror" in attrs]
    assert page.text.count('<img src=x onerror=alert(1)>"\'&$x_1$ {{ 7 * 7 }} id="y"?') > 5


@pytest.mark.parametrize("events", [[], [stepped(1)], [stepped(i, math.nan) for i in (1, 2)]])
def test_a_run_of_a_few_odd_steps_is_reported(tmp_path: Path, events: list[Any]) -> None:
    text = Page(report(write_events(write_run(tmp_path), events))).text
    assert "running, or killed" in text
    assert ("no step was logged" in text) == (not events)
    assert ("2 of 2 logged losses are not finite" in text) == (len(events) == 2)
    assert "nan" not in text.lower().split()


def test_a_failed_dense_run_with_broken_lines_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path, mode="dense", steps=20, eval_every=0, end="failed")
    with open(folder / "metrics.jsonl", "a") as lines:
        lines.write("{\n{\n")
    text = Page(report(folder)).text
    assert "unreadable lines in metrics.jsonl: 2; it failed." in text
    assert "not measured" in text  # no model state
    assert "The training loss is" in text
    assert "not validated yet" in text


def test_many_runs_share_a_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{i}", name=f"run {i}", steps=20 + i) for i in range(10)]
    other = {"hardware": {"device_name": "other"}, "data": {"fingerprint": "other"}}
    ranks = {"ranks": {"pipe": 2, "data": 1}}
    runs[0] = write_run(tmp_path / "0", steps=20, changes=other | ranks)
    source = report(*runs)
    assert source.count('class="dashed"') == 2 * 4  # the last four, in two keys
    assert Page(source).values("class").count("card") == 10
    assert "not all use the same hardware" in source
    assert "not all trained on the same data" in source
    assert "samo, float32, 2 ranks: 2 stages, finished" in source
    assert "model state is that of one replica" in source


def test_a_link_in_a_run_folder_is_not_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    (tmp_path / "mine").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "mine")
    write_report([run], run / "report.html")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    with pytest.raises(samo.ConfigError, match=r"--out must end in \.html, got '.*report\.png'"):
        write_report([run], tmp_path / "report.png")
    with pytest.raises(samo.RunError, match=r"cannot write '.*': No such file or directory"):
        write_report([run], tmp_path / "nowhere" / "report.html")
