"""Train one GPT by ``samo train`` in several layouts of ranks, and compare the losses step by step.

Layouts are pipe x data. Ranks share the machine: its cores, or its one GPU, over gloo.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.measure import Row, arguments, show, write_rows
from samo.data.standard_library import write_library_text
from samo.utils.environment import hardware

LAYOUTS: Final[tuple[tuple[int, int], ...]] = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))
MODELS: Final = {
    "cuda": "--num-layers 8 --width 512 --num-heads 8 --context 256 --batch-size 16 --lr 1e-3".split(),  # noqa: SIM905
    "cpu": "--num-layers 4 --width 256 --num-heads 4 --context 128 --batch-size 8 --lr 1e-3".split(),  # noqa: SIM905
}
TOY: Final = "--num-layers 2 --width 32 --num-heads 2 --context 32 --batch-size 4 --lr 1e-3".split()  # fmt: skip  # noqa: SIM905


def main() -> None:
    """Train in every layout and print how far losses are from those of one rank."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--device", choices=MODELS, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    rows: list[Row] = []
    steps, dtypes = (4, ["float32"]) if options.toy else (options.steps, options.dtypes)
    layouts = LAYOUTS[:1] + LAYOUTS[-1:] if options.toy else LAYOUTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = write_library_text(folder)
        for dtype in dtypes:
            settings = [
                *(TOY if options.toy else MODELS[options.device]),
                "--dtype",
                dtype,
                "--steps",
                str(steps),
            ]
            settings += ["--device", options.device]
            mine: list[Row] = []
            for number, layout in enumerate(layouts):
                out = folder / f"{dtype}-{number}"
                _train(texts, out, layout, settings)
                mine.append(_row(out, dtype, layout) | {"settings": " ".join(settings)})
            first = mine[0]
            for row in mine:
                apart = [abs(a - b) / b for a, b in zip(row["losses"], first["losses"])]
                row["largest_difference"] = max(apart)
            rows += mine
    show(rows, ["dtype", "layout", "last_loss", "valid_loss", "largest_difference"])  # fmt: skip
    device = hardware(torch.device(options.device))["device_name"]
    write_rows(options.out, [row | {"device_name": device} for row in rows])


def _train(
    texts: tuple[Path, Path], out: Path, layout: tuple[int, int], settings: list[str]
) -> None:
    pipe, data = layout
    command = [sys.executable, "-m", "samo", "launch", "-n", str(pipe * data), "train", str(texts[0])]  # fmt: skip
    command += ["--valid", str(texts[1]), "--out", str(out), "--pipe", str(pipe)]
    command += ["--log-every", "1", "--dense-steps", "2", "--sample-tokens", "0", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")  # fmt: skip


def _row(out: Path, dtype: str, layout: tuple[int, int]) -> Row:
    """Return what a run wrote: losses of rank 0, and what every rank held and sent."""
    pipe, data = layout
    lines = (out / "metrics.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "step"]
    last = {event["rank"]: event for event in events if event["event"] == "traffic"}
    return {
        "dtype": dtype,
        "layout": f"{pipe}x{data}",
        "losses": [event["loss"] for event in steps],
        "last_loss": steps[-1]["loss"],
        "valid_loss": [e["valid_loss"] for e in events if e["event"] == "eval"][-1],
        "tokens_per_s": steps[-1]["tokens_per_s"],
        "sent_bytes": [e["gradient_bytes"] + e["activation_bytes"] for e in last.values()],
        "memory_bytes": [e["memory_bytes"] for e in last.values() or steps[-1:]],
    }


if __name__ == "__main__":
    main()
