"""Does a run that is killed at any moment lose anything?

Runs of a tiny model save every step, while they train, so that most kills meet a save. A seed
draws the moment of each kill (SIGKILL), during start-up too, and what is killed: the process, or of
two stages with two replicas a rank, the launcher or all. After each kill every process of the run
must be gone, all checkpoints are read whole, and the run is resumed. Runs that finish are compared
with one that nobody disturbed.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, zip_longest
from pathlib import Path
from typing import Final

import torch
from tests.train.helpers import losses, tensors

from benchmarks.faults.bench import Launched, last_event, write_text
from benchmarks.measure import Row, arguments, show, write_rows
from samo.checkpoint import read_manifest, verify
from samo.errors import CheckpointError, SamoError

STEPS: Final = 80
CASES: Final = {
    "magnitude": "train notes.txt --dense-steps 12",
    "rigl, --keep 3": "train notes.txt --method rigl --dense-steps 4 --mask-every 3 --mask-stop 70 "
    "--keep 3",
    "2 stages x 2 replicas": "launch -n 4 train notes.txt --pipe 2 --dense-steps 12",
}
SETTINGS: Final = (
    f"--steps {STEPS} --save-every 1 --eval-every 4 --eval-batches 2 --log-every 1 --batch-size 4 "
    "--num-layers 2 --width 32 --num-heads 2 --context 32 --sample-tokens 5 --timeout-s 60 "
    "--device cpu"
)
AT_START: Final = 0.15
"""Part of the kills that come within some seconds after the start, wherever the run is then."""
RESULTS: Final = Path(__file__).parent / "results" / "kills.jsonl"


def main() -> None:
    """Kill runs and resume them, one after the other."""
    parser = arguments(__doc__)
    parser.set_defaults(out=RESULTS)
    parser.add_argument("--count", type=int, default=50, help="kills, over all cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="of these")
    options = parser.parse_args()
    number = len(options.cases) if options.toy else options.count
    rows: list[Row] = []
    for place, case in enumerate(options.cases):
        kills = len(range(place, number, len(options.cases)))
        home = tempfile.mkdtemp(prefix="samo-kills-")
        os.environ["TMPDIR"] = home  # for what a killed launcher leaves
        for row in disturb(case, kills, random.Random(f"{case} {options.seed}"), Path(home)):
            rows.append({"case": case, "seed": options.seed, **row})
            print(json.dumps(rows[-1]), flush=True)
            write_rows(options.out, rows)
        del os.environ["TMPDIR"]
        if all(row.get("is_equal", True) for row in rows):  # otherwise they are there to look at
            shutil.rmtree(home)
    show([summary(case, [r for r in rows if r["case"] == case]) for case in options.cases], COLUMNS)


@dataclass
class Run:
    """A run that is started again and again, and what was seen of it after the last kill."""

    case: str
    folder: Path
    step: int = 0
    leftovers: set[str] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """Whether it has trained to its end."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.exists() and '"reason": "done"}' in metrics.read_text()[-40:]

    def start(self) -> Launched:
        """Start it, or resume it if it has come as far as that."""
        words = f"{CASES[self.case]} {SETTINGS} --out {self.folder.name}"
        if (self.folder / "run.json").exists():
            launch = CASES[self.case].partition("train")[0]
            words = f"{launch}train --resume {self.folder.name}"
        return Launched(words.split(), self.folder.parent, f"{self.folder.name}.txt")

    def finish(self) -> str:
        """Run it to its end; return what went wrong."""
        launched = self.start()
        is_over = launched.wait_until_gone(time.monotonic(), 600)
        launched.end()
        if not is_over or launched.process.returncode:
            return f"exit code {launched.process.returncode}: {launched.said()[-2000:]}"
        return ""

    def look(self) -> Row:
        """Read all checkpoints; return their state, and compare it with that before."""
        found: Row = {"whole": True, "checkpoint_step": 0}
        for manifest in self.folder.glob("checkpoints/*/manifest.json"):
            try:
                step = verify(manifest.parent).extra["progress"]["step"]
            except CheckpointError as error:
                found |= {"whole": False, "error": str(error)}
            else:
                found["checkpoint_step"] = max(step, found["checkpoint_step"])
        now = leftovers(self.folder)
        found["went_back"] = found["checkpoint_step"] < self.step
        found["leftovers"] = sorted(now)
        # What the last kill left is gone once the run has saved again.
        found["not_removed"] = (
            sorted(now & self.leftovers) if found["checkpoint_step"] > self.step else []
        )
        self.step, self.leftovers = found["checkpoint_step"], now
        return found


def disturb(case: str, kills: int, draw: random.Random, home: Path) -> Iterator[Row]:
    """Kill runs of one case; yield a row for each kill, and one for each run that has finished."""
    write_text(home / "notes.txt", draw)
    undisturbed = Run(case, home / "undisturbed")
    assert not undisturbed.finish()
    for number in count(1):
        run = Run(case, home / f"run-{number}")
        while kills > 0 and not run.is_done:
            row = kill(run, draw)
            if row is not None:
                kills -= 1
                yield {"run": number} | row
        yield {"run": number} | finished(run, undisturbed)
        if kills == 0:
            return


def kill(run: Run, draw: random.Random) -> Row | None:
    """Start or resume a run and kill it; None if it has ended before."""
    metrics = run.folder / "metrics.jsonl"
    launched = run.start()
    began = time.monotonic()
    is_launch = CASES[run.case].startswith("launch")
    victim = draw.choice(["a rank", "launcher", "all"]) if is_launch else "process"
    if draw.random() < AT_START:
        moment, delay_s = "start", draw.uniform(0.0, 12.0 if is_launch else 6.0)
    else:
        moment, delay_s = "training", draw.uniform(0.0, 0.3 if is_launch else 0.04)
        wanted = run.step + draw.randint(1, STEPS // 4)
        first = metrics.stat().st_size if metrics.exists() else 0
        while launched.process.poll() is None and time.monotonic() < began + 240:
            is_new = metrics.exists() and metrics.stat().st_size != first
            if is_new and last_event(metrics, "step").get("step", 0) >= wanted:
                break
            time.sleep(0.002)
    time.sleep(delay_s)
    ranks = launched.ranks()
    if launched.process.poll() is not None:
        return None
    pids = [launched.process.pid]
    if victim == "all" or (victim == "a rank" and not ranks):
        pids = [*launched.processes()]
    elif victim == "a rank":
        victim = f"rank {draw.choice(sorted(ranks))}"
        pids = [ranks[int(victim.removeprefix("rank "))]]
    row: Row = {"victim": victim, "moment": moment} | last_event(metrics)
    killed_s = time.monotonic()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    row["all_gone"] = launched.wait_until_gone(killed_s, 60)
    row["seconds"] = time.monotonic() - killed_s
    launched.end()
    row["exit_code"] = launched.process.returncode
    return row | run.look()


def finished(run: Run, undisturbed: Run) -> Row:
    """Resume a run to its end, and compare it with one that was not disturbed."""
    # A kill after the end met the report, which samo report makes again.
    error = "" if run.is_done else run.finish()
    if not error:
        run.look()
        try:
            error = difference(run.folder, undisturbed.folder)
        except (SamoError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        if run.leftovers:
            error = f"left over: {run.leftovers}"
    return {"is_equal": not error, "error": error[:2000]}


def difference(one: Path, other: Path) -> str:
    """Return the first thing in which two finished runs differ; "" if they are equal."""
    for found, expected in zip_longest(losses(one), losses(other)):
        if found != expected:
            return f"{found} instead of {expected}"
    folders = [{path.name for path in run.glob("checkpoints/*")} for run in (one, other)]
    if folders[0] != folders[1]:
        return f"checkpoints {folders[0]} instead of {folders[1]}"
    for name in folders[0]:
        ours, theirs = tensors(one, name), tensors(other, name)
        for key in ours.keys() | theirs.keys():
            if key not in ours or key not in theirs or not torch.equal(ours[key], theirs[key]):
                return f"{key} of {name}"
    return ""


def leftovers(run: Path) -> set[str]:
    """Return files that no checkpoint or run is made of."""
    found = {*run.glob(".*"), *run.glob("checkpoints/*/.*")}
    for folder in run.glob("checkpoints/*/"):
        data = None
        with suppress(CheckpointError):
            data = read_manifest(folder).data.name
        found |= {path for path in folder.glob("data-*") if path.name != data}
    return {str(path.relative_to(run)) for path in found}


COLUMNS: Final = ("case", "kills", "in a save", "whole", "went back", "left running", "worst s", "not removed", "finished", "equal")  # fmt: skip


def summary(case: str, rows: list[Row]) -> Row:
    """Return what a table says of one case."""
    kills, runs = ([r for r in rows if name in r] for name in ("victim", "is_equal"))
    return {
        "case": case,
        "kills": len(kills),
        "in a save": sum(bool(row["leftovers"]) for row in kills),
        "whole": sum(row["whole"] for row in kills),
        "went back": sum(row["went_back"] for row in kills),
        "left running": sum(not row["all_gone"] for row in kills),
        "worst s": max((row["seconds"] for row in kills), default=0.0),
        "not removed": sum(bool(row["not_removed"]) for row in kills),
        "finished": len(runs),
        "equal": sum(row["is_equal"] for row in runs),
    }


if __name__ == "__main__":
    main()
