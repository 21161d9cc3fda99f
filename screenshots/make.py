"""Make terminal.png and report.png: run ``samo demo`` as a person would, and photograph both.

The demo runs in a pseudo-terminal of 100 columns, so that it draws its live bars. What it wrote goes
through a terminal emulator (pyte) into a page, and a headless browser takes the picture.
"""

import argparse
import fcntl
import html
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from PIL import Image

HERE: Final = Path(__file__).parent
COLUMNS: Final = 100
LINES: Final = 400  # taller than all that is printed: nothing scrolls away
RECORD: Final = "terminal.ansi"
MAX_BYTES: Final = 250_000

TOY: Final = (
    "import sys; from samo.cli import demo; from samo.cli.main import main; demo.STEPS = 12; demo.DENSE_STEPS = 4; "
    "sys.exit(main(['demo']))"
)

COLOURS: Final = {
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#e6edf3",
}
"""What pyte calls the eight colours, on a dark ground."""

PAGE: Final = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #0d1117; }}
pre {{ margin: 0; padding: 20px 24px; width: {columns}ch; color: #c9d1d9;
  font: 14px/{line_px}px "DejaVu Sans Mono", "Liberation Mono", monospace; }}
</style><pre>{text}</pre>"""

LINE_PX: Final = 18
CHARACTER_PX: Final = 8.43


class Style(NamedTuple):
    """How a character looks."""

    colour: str
    is_bold: bool


def main() -> None:
    """Make both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--demo", type=Path, help="a demo to photograph; made there if it is new")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the pictures")
    parser.add_argument("--toy", action="store_true", help="12 steps, to see that it runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        demo = arguments.demo
        if demo is None or not (demo / RECORD).is_file():
            if demo is not None and demo.exists():
                parser.error(f"'{demo}' has no {RECORD}: it was not made by this script")
            made = record(Path(folder), is_toy=arguments.toy)
            demo = shutil.move(made, demo) if demo else made
        arguments.out.mkdir(parents=True, exist_ok=True)
        photograph_terminal(Path(demo) / RECORD, arguments.out / "terminal.png", Path(folder))
        photograph(
            Path(demo) / "report.html", arguments.out / "report.png", width=1280, height=1600
        )


def record(folder: Path, *, is_toy: bool) -> Path:
    """Run the demo in a terminal, and return its folder; what it wrote lies there too."""
    command = [sys.executable, *(["-c", TOY] if is_toy else ["-m", "samo", "demo"])]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = bytearray()
    try:
        while piece := os.read(ours, 2**16):
            written += piece
    except OSError:  # what Linux answers when the other side is closed
        pass
    if process.wait():
        sys.exit(f"samo demo ended with {process.returncode}:\n{written.decode(errors='replace')}")
    demo = folder / "runs" / "demo"
    (demo / RECORD).write_bytes(written)
    return demo


def photograph_terminal(recorded: Path, picture: Path, folder: Path) -> None:
    """Turn what a program wrote into a picture of its terminal."""
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    stream.feed(b"\x1b[32m$\x1b[0m \x1b[1msamo demo\x1b[0m\r\n\r\n" + recorded.read_bytes())
    lines = [[screen.buffer[y][x] for x in range(COLUMNS)] for y in range(LINES)]
    while lines and not "".join(character.data for character in lines[-1]).strip():
        lines.pop()
    text = "\n".join(map(row, lines))
    page = folder / "terminal.html"
    page.write_text(PAGE.format(columns=COLUMNS, line_px=LINE_PX, text=text), "utf-8")
    width, height = round(CHARACTER_PX * COLUMNS) + 48, LINE_PX * len(lines) + 40
    photograph(page, picture, width=width, height=height)


def row(characters: Iterable[Any]) -> str:
    """Return one line of a terminal as HTML."""
    parts = []
    for style, group in groupby(characters, key=style_of):
        text = html.escape("".join(character.data for character in group))
        weight = ";font-weight:bold" if style.is_bold else ""
        if style.colour or weight:
            text = f'<span style="color:{style.colour or "inherit"}{weight}">{text}</span>'
        parts.append(text)
    return "".join(parts).rstrip()


def style_of(character: Any) -> Style:
    """Return how pyte says that a character looks; a colour is a name or six hex digits."""
    colour = character.fg.removeprefix("bright")
    if colour == "default":
        return Style("", character.bold)
    return Style(COLOURS.get(colour) or f"#{colour}", character.bold)


def photograph(page: Path, picture: Path, *, width: int, height: int) -> None:
    """Take a picture of a page, with 256 colours: half the bytes, and no eye sees it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        sys.exit(f"no browser found; install one of {', '.join(names)}")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                "--force-device-scale-factor=1.5",
                f"--window-size={width},{height}",
                f"--screenshot={picture.resolve()}",
                page.resolve().as_uri(),
            ],
            check=True,
            capture_output=True,
        )
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)
    size = picture.stat().st_size
    sys.stdout.write(f"{picture}: {size:,} bytes\n")
    if size > MAX_BYTES:
        sys.exit(f"{picture} has {size:,} bytes, at most {MAX_BYTES:,} are meant to be committed")


if __name__ == "__main__":
    main()
