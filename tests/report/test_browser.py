"""The report in a real browser: no complaints, nothing sideways out of the window, text that can be read."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from samo.report.page import write_report
from tests.report.test_masks import add_lines, changed, observed
from tests.train.runs import fake_masks, write_run

BROWSER: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome"),
]

# A frame, since a headless window is never narrower than 500 pixels.
FRAME: Final = """<!doctype html>
<body><iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const inner = frame.contentDocument, root = inner.documentElement;
  const shown = [...inner.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width);
  const column = inner.querySelector("section").getBoundingClientRect();
  const texts = shown.flatMap(svg => [...svg.querySelectorAll("text")].map(text => ({{
    text: text.textContent,
    size: parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a,
    right: text.getBoundingClientRect().right, left: text.getBoundingClientRect().left,
  }})));
  document.body.dataset.seen = JSON.stringify({{
    window: root.clientWidth, content: root.scrollWidth, figures: shown.length,
    outside: texts.filter(t => t.left < column.left - 1 || t.right > column.right + 1).map(t => t.text),
    smallest: Math.min(...texts.map(t => t.size)),
  }});
}};
</script>"""


def look(source: str, width: int, folder: Path) -> dict[str, Any]:
    """Open a page in a frame of this width and say what the browser made of it."""
    (folder / "frame.html").write_text(
        FRAME.format(width=width, page=html.escape(source)), encoding="utf-8"
    )
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width + 100},1000",
            "--virtual-time-budget=5000",
            "--dump-dom",
            (folder / "frame.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(html.unescape(seen[1])), "complaints": complaints}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    base = tmp_path_factory.mktemp("runs")
    name = "a-name-without-any-place-to-break-it-" * 4
    runs = [
        write_run(base / "a", name=name, steps=150, masks=fake_masks(), sample="x" * 500),
        write_run(base / "b", steps=150, masks=fake_masks(num_layers=9)),
        write_run(base / "c", mode="dense", steps=150),
    ]
    add_lines(runs[0], [*observed(9), *changed((110, 120), (50_000, 40_000))])
    return write_report(runs, base / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [320, 390, 700, 701, 1280])
def test_the_page_fits_its_window(source: str, width: int, tmp_path: Path) -> None:
    seen = look(source, width, tmp_path)
    assert seen["complaints"] == []
    assert seen["window"] == width
    assert seen["content"] <= width
    assert seen["figures"] == 7  # wide or narrow, not both
    assert seen["outside"] == []
    assert seen["smallest"] > 8.5


def test_what_sticks_out_or_complains_is_noticed(source: str, tmp_path: Path) -> None:
    broken = source.replace(
        "</main>", '<div style="width:600px">wide</div><script>undefined_name()</script></main>'
    ).replace(".narrow{display:block}", ".narrow{display:block}.wide{display:block!important}")
    seen = look(broken, 390, tmp_path)
    assert seen["content"] > 390
    assert "undefined_name is not defined" in seen["complaints"][0]
    assert seen["figures"] == 14
    assert seen["smallest"] < 8.5
