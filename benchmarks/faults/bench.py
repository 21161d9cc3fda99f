"""How soon is a run on four ranks gone when one of them is killed or stopped, and who says which?

Each fall starts `samo launch -n 4 train` with a tiny model, waits for a moment that a seed draws,
and sends SIGKILL or SIGSTOP to a rank that it draws too. Then it waits until no process of the run
is left, launcher and orphans included: all of them carry a mark in their environment. It reads what
they said, opens the checkpoint, and resumes some of the runs.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import samo
from benchmarks.measure import Row, arguments, show, write_rows
from samo.checkpoint import verify
from samo.train.run_dir import RunDir

RANKS: Final = 4
LAYOUTS: Final = {"4 replicas": (1, 4), "2 stages x 2 replicas": (2, 2)}
"""Stages and replicas."""
DENSE_STEPS: Final = 40
SETTINGS: Final = {
    "batch-size": 8,
    "num-layers": 2,
    "width": 32,
    "num-heads": 2,
    "context": 32,
    "dense-steps": DENSE_STEPS,
    "log-every": 1,
    "eval-every": 6,
    "eval-batches": 2,
    "save-every": 4,
    "sample-tokens": 0,
    "steps": 1_000_000,
}
MOMENTS: Final = ("start-up", "dense", "prune", "compressed", "compressed")
"""From the first process to the first step; dense steps; around the prune; with compressed state. Every
fourth step is saved and every sixth validated, so that falls meet that too."""
RESUMED: Final = (5, 8, 14)
"""Numbers of the falls whose runs are gone on with."""
SOURCE: Final = str(Path(samo.__file__).parent.parent)
MARK: Final = "SAMO_FAULTS_RUN"


def main() -> None:
    """Let ranks fall, one run after the other."""
    parser = arguments(__doc__)
    parser.add_argument("--falls", type=int, default=20, help="falls of each layout")
    parser.add_argument("--timeout-s", type=float, default=8.0, help="the limit that the runs get")
    parser.add_argument("--first", type=int, default=0, help="number of the first fall")
    options = parser.parse_args()
    rows: list[Row] = []
    for number in range(options.first, options.first + (1 if options.toy else options.falls)):
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory(prefix="samo-faults-") as folder:
                rows.append(fall(layout, number, options.timeout_s, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
            write_rows(options.out, rows)
    show([summary(rows, layout, how) for layout in LAYOUTS for how in ("kill", "stop")], COLUMNS)


def fall(layout: str, number: int, limit_s: float, folder: Path) -> Row:
    """Start a run, let a rank fall, and return what came of it."""
    draw = random.Random(f"{layout} {number}")
    stages, replicas = LAYOUTS[layout]
    victim = draw.randrange(RANKS)
    how = ("kill", "stop")[number % 2]
    moment = MOMENTS[number // 2 % len(MOMENTS)]
    write_text(folder / "notes.txt", draw)
    command = ["launch", "-n", str(RANKS), "--logs", "logs", "train", "notes.txt", "--out", "run"]
    command += ["--pipe", str(stages), "--data", str(replicas), "--timeout-s", str(limit_s)]
    command += [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    run = Launched(command, folder, "said.txt")
    delay_s = wait_for_moment(run, moment, folder / "run" / "metrics.jsonl", draw)
    time.sleep(delay_s)
    row: Row = {"layout": layout, "fall": number, "how": how, "rank": victim, "moment": moment}
    row |= {"delay_s": delay_s, "limit_s": limit_s}
    ranks = run.ranks()
    if run.process.poll() is not None or victim not in ranks:
        row |= {"error": "the run had ended before the fall", "said": run.said()[-2000:]}
        run.end()
        return row
    row |= last_event(folder / "run" / "metrics.jsonl")
    began = time.monotonic()
    os.kill(ranks[victim], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    is_over = run.wait_until_gone(began, limit_s + 60)
    seconds = time.monotonic() - began
    row |= {"seconds": seconds, "over_s": seconds - limit_s, "all_gone": is_over}
    run.end()
    stage = victim // replicas if stages > 1 else None
    row |= named(run.said(), victim, stage, stages) | {"exit_code": run.process.returncode}
    row |= look_at_checkpoints(folder / "run")
    if number in RESUMED:
        row |= go_on(folder, limit_s, row.get("checkpoint_step"))
    return row


class Launched:
    """A run of samo, and all processes that it has started."""

    def __init__(self, command: Sequence[str], folder: Path, said: str) -> None:
        self._mark: Final = uuid.uuid4().hex
        self._folder: Final = folder
        self._file: Final = folder / said
        self.seen: set[int] = set()
        with open(self._file, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "samo", *command],
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
            )

    def processes(self) -> dict[int, str | None]:
        """Return all processes of the run that live, and the rank of those that have one."""
        found: dict[int, str | None] = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if not entry.name.isdigit():
                    continue
                texts = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if f"{MARK}={self._mark}" in texts:
                    numbers = [t.removeprefix("RANK=") for t in texts if t.startswith("RANK=")]
                    found[int(entry.name)] = numbers[0] if numbers else None
        return found

    def ranks(self) -> dict[int, int]:
        """Return process numbers of the ranks."""
        return {int(rank): pid for pid, rank in self.processes().items() if rank is not None}

    def wait_until_gone(self, began: float, seconds: float) -> bool:
        """Wait until no process is left; return whether that is so."""
        # A process that has just started has no environment to be found by for a moment.
        while self.process.poll() is None or self.processes():
            if time.monotonic() - began > seconds:
                return False
            time.sleep(0.05)
        return True

    def said(self) -> str:
        """Return what launcher and ranks have said."""
        logs = sorted((self._folder / "logs").rglob("std*.log"))
        return "\n".join(p.read_text(errors="replace") for p in [self._file, *logs])

    def end(self) -> None:
        """End what is left, if the run has not."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def wait_for_moment(run: Launched, moment: str, metrics: Path, draw: random.Random) -> float:
    """Wait for what goes before a moment; return how long to wait further."""
    while not run.ranks() and run.process.poll() is None:
        time.sleep(0.02)
    if moment == "start-up":
        return draw.uniform(0.0, 8.0)
    wanted = {
        "dense": ("step", 1),
        "prune": ("step", DENSE_STEPS - 2),
        "compressed": ("step", DENSE_STEPS + 1),
    }
    event, step = wanted[moment]
    deadline = time.monotonic() + 90
    while run.process.poll() is None and time.monotonic() < deadline:
        last = last_event(metrics, event)
        if last and last["step"] >= step:
            break
        time.sleep(0.02)
    return draw.uniform(0.0, {"dense": 0.8, "prune": 2.0, "compressed": 4.0}[moment])


def last_event(metrics: Path, event: str | None = None) -> Row:
    """Return the last event that was written, or the last of a kind, and its step."""
    lines = metrics.read_text(errors="replace").splitlines() if metrics.exists() else []
    for line in reversed(lines):
        with suppress(ValueError):
            found = json.loads(line)
            if event in (None, found["event"]) and found["event"] != "traffic":
                return {"last_event": found["event"], "step": found["step"]}
    return {}


def named(said: str, victim: int, stage: int | None, stages: int) -> Row:
    """Return which ranks name the failed rank with its stage, and whether the launcher does."""
    place = f"rank {victim}"
    if stage is not None:
        place += rf"(?: \(stage {stage} of {stages}\)| is stage {stage} of {stages})"
    lines = {line for line in said.splitlines() if "samo: " in line}
    by_ranks = set()
    launcher = ""
    for line in lines:
        speaker = re.search(r"samo: rank (\d+): (.*)", line)
        if speaker is None and re.match(r"samo: rank \d", line):
            launcher = line
        elif speaker is not None and re.search(rf"{place}(?!\d)", speaker[2]):
            by_ranks.add(int(speaker[1]))
    return {
        "named_by_ranks": sorted(by_ranks - {victim}),
        "named_by_launcher": re.match(rf"samo: {place}(?!\d)", launcher) is not None,
        "launcher_said": launcher,
        "ranks_said": sorted(line for line in lines if re.match(r"samo: rank \d+: ", line)),
    }


def look_at_checkpoints(run: Path) -> Row:
    """Read every checkpoint of a run whole; return the step of the newest."""
    found: Row = {"checkpoint_step": None, "checkpoints_whole": True}
    if not last_event(run / "metrics.jsonl", "save") and not RunDir(run).has_checkpoint:
        return found  # it failed in its first save, and starts again at its first step
    for path in sorted(run.glob("checkpoints/*/")):
        if path.name not in ("last", "best"):
            continue  # unfinished, and never read
        try:
            step = verify(path).extra["progress"]["step"]
        except Exception as error:
            found |= {"checkpoints_whole": False, "checkpoint_error": f"{path.name}: {error}"}
        else:
            found["checkpoint_step"] = max(step, found["checkpoint_step"] or 0)
    return found


def go_on(folder: Path, limit_s: float, step: int | None) -> Row:
    """Resume a run for a few steps; return whether that went well."""
    if not (folder / "run" / "run.json").exists():
        return {}
    command = ["launch", "-n", str(RANKS), "train", "--resume", "run"]
    steps = max(step or 0, DENSE_STEPS) + 5
    run = Launched([*command, "--steps", str(steps)], folder, "resumed.txt")
    is_over = run.wait_until_gone(time.monotonic(), 240)
    run.end()
    end = last_event(folder / "run" / "metrics.jsonl", "end")
    went_well = is_over and run.process.returncode == 0 and end.get("step") == steps
    return {"resumed": went_well} | ({} if went_well else {"resume_said": run.said()[-2000:]})


COLUMNS: Final = ("layout", "how", "falls", "median s", "worst s", "worst over", "named", "whole", "resumed")  # fmt: skip


def summary(rows: Sequence[Row], layout: str, how: str) -> Row:
    """Return what a table says of one layout and one way to fall."""
    all_of = [row for row in rows if (row["layout"], row["how"]) == (layout, how)]
    of = sorted((row for row in all_of if "seconds" in row), key=lambda row: row["seconds"])
    if not of:
        return {"layout": layout, "how": how, "falls": 0}
    resumed = [row["resumed"] for row in of if "resumed" in row]
    return {
        "layout": layout,
        "how": how,
        "falls": f"{len(of)} of {len(all_of)}",
        "median s": of[len(of) // 2]["seconds"],
        "worst s": of[-1]["seconds"],
        "worst over": of[-1]["over_s"],
        "named": sum(bool(row["named_by_ranks"]) or row["named_by_launcher"] for row in of),
        "whole": sum(row["all_gone"] and row["checkpoints_whole"] for row in of),
        "resumed": f"{sum(resumed)} of {len(resumed)}",
    }


def write_text(path: Path, draw: random.Random) -> None:
    """Write a text to train on."""
    words = ["the", "model", "keeps", "one", "weight", "of", "ten", "and", "sends", "it"]
    path.write_text("\n".join(" ".join(draw.choices(words, k=10)) for _ in range(2000)))


if __name__ == "__main__":
    main()
