"""Compiled CPU loops, cached on disk in one process and loaded in the next."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
from samo import Mask
from samo.kernels import cpu

torch.manual_seed(0)
keep = torch.arange(5000) % 3 == 0
mask, dense = Mask.from_bool(keep), torch.randn(5000)
values, back = torch.full((mask.kept,), 7.0), torch.full((5000,), 7.0)
if "compress" in sys.argv:
    cpu.compress_(dense, mask, values)
    assert torch.equal(values, dense[keep])
if "expand" in sys.argv:
    cpu.expand_(dense[keep], mask, back)
    assert torch.equal(back, dense * keep)
"""


def test_loops_from_the_cache_do_not_stand_in_for_others(tmp_path: Path) -> None:
    """A process adds one loop to the cache, so that others meet it in another order."""
    for order in (["compress"], ["compress", "expand"], ["compress", "expand"]):
        command = [sys.executable, "-c", PROGRAM, *order]
        cached = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run(command, env=cached, check=True, timeout=120)
    assert list(tmp_path.rglob("*.nbc"))
