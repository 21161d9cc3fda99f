"""What a step costs beside computing, on 2 stages of tiny layers, and what connecting ranks takes.

Fixed cost: a step of one micro-batch. Per micro-batch: the slope from 4 to 32, on each stage; one
pass forward and one backward, one message sent and one received. With ``--against CHECKOUT`` the
same program runs on another version of samo, in turns.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from benchmarks.measure import Row, arguments, show, spread, write_rows
from samo.distributed import store
from samo.pipeline.transport import connect

COUNTS: Final = (1, 4, 32)
PROGRAM: Final = """
import json, sys, time, torch, samo, torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
mesh, steps, found = samo.mesh(pipe=2), int(sys.argv[1]), {}
for count in (1, 4, 32):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipeline = samo.Pipeline(layers, nn.functional.mse_loss, mesh, micro_batches=count)
    x, times = torch.ones(64, 8), []
    for step in range(steps + 5):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        pipeline.step(x, target=x)
        times.append([(time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3])
    found[count] = [sorted(each)[steps // 2] for each in zip(*times[5:])]
    pipeline.close()
print(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def time_steps(source: Path, steps: int) -> list[dict[str, list[float]]]:
    """Return milliseconds of a step by number of micro-batches, wall and CPU, for each rank."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, str(steps)]
        ranks.append(
            subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, text=True)
        )
    said = [rank.communicate()[0] for rank in ranks]
    return [json.loads(line.splitlines()[-1]) for line in said]


class CountingStore:
    """Counts the operations on a store."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self._store, name)


def count_connections(num_ranks: int) -> Row:
    """Connect ranks, each a thread of this process, and count what they need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    counts: list[Counter[str]] = [Counter() for _ in range(num_ranks)]
    links: dict[int, dict[int, socket.socket]] = {}

    def work(place: int, meeting: connect.Meeting) -> None:
        links[place] = meeting.links()

    threads = []
    for place in range(num_ranks):
        store._counts.clear()  # as in a process of its own
        meeting = connect.Meeting(range(num_ranks), place, timeout_s=60)
        object.__setattr__(meeting, "store", CountingStore(meeting.store, counts[place]))
        threads.append(threading.Thread(target=work, args=(place, meeting)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.destroy_process_group()
    row = {
        "ranks": num_ranks,
        "store operations of a rank": max(sum(count.values()) for count in counts),
        "sockets of a rank": max(len(own) for own in links.values()),
    }
    for own in links.values():
        for link in own.values():
            link.close()
    return row


def _rows(name: str, runs: Sequence[list[dict[str, list[float]]]]) -> Row:
    row: Row = {"version": name, "runs": len(runs)}
    for place, kind in enumerate(("wall", "cpu")):
        fixed = [max(rank["1"][place] for rank in run) for run in runs]
        slope = [max((rank["32"][place] - rank["4"][place]) / 28 for rank in run) for run in runs]
        row |= {f"fixed, ms {kind}": spread(fixed)["median"]}
        row |= {f"per micro-batch, ms {kind}": spread(slope)["median"]}
    return row


def main() -> None:
    """Time steps, count connections and print both."""
    parser = arguments(__doc__)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each version, in turns")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run")
    options = parser.parse_args()
    sources = {"this version": Path(__file__).parents[2] / "src"}
    if options.against is not None:
        sources[options.against.name] = options.against / "src"
    rounds, steps = (1, 3) if options.toy else (options.rounds, options.steps)
    runs: dict[str, list[Any]] = {name: [] for name in sources}
    for _ in range(rounds):
        for name, source in sources.items():
            runs[name].append(time_steps(source, steps))
    rows = [_rows(name, each) for name, each in runs.items()]
    show(rows, list(rows[0]))
    connections = [count_connections(num) for num in ((4,) if options.toy else (8, 64))]
    show(connections, list(connections[0]))
    write_rows(options.out, [*rows, *connections])


if __name__ == "__main__":
    main()
