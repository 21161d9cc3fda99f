"""Every benchmark runs at toy size, so that none rots; what it measures is not looked at here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cpu_kernels import bench as cpu_kernels
from benchmarks.cpu_step import bench as cpu_step
from benchmarks.data_parallel import bench as data_parallel


# torch.compile imports deprecated parts of torch, and the peers warn as they are imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("bench", "rows"),
    [(cpu_step, 3), (cpu_kernels, 39), (data_parallel, 6)],
    ids=["cpu_step", "cpu_kernels", "data_parallel"],
)
def test_it_runs_and_writes_its_rows(
    bench: Any, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", "--toy", "--rounds", "2", "--out", str(out)])
    # Peers and compilers take a minute to load; the loops around them are what is tried here.
    for name in ("torchao.optim", "bitsandbytes.optim", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    bench.main()
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == rows
    assert all({"cpu", "torch", "commit", "date"} <= row.keys() for row in written)
