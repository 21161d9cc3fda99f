"""Programs that leave the end of a pipeline to the interpreter: they exit with their own code."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

START = """
import time, torch, samo, torch.distributed as dist
from torch import nn

class Lingers:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # while the interpreter ends: a thread that wakes up now aborts the process

lingers = Lingers()
"""
NOT_CLOSED = """
first = nn.Linear(4, 4)  # the last stage is done while this one computes, and must not end it
first.register_full_backward_pre_hook(lambda module, grads: time.sleep(0.3))
mesh = samo.mesh(pipe=2)
pipeline = samo.Pipeline([first, nn.Linear(4, 4)], nn.functional.mse_loss, mesh, 2, timeout_s=5)
pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
time.sleep(0.3)  # torch aborts if its thread drops the last collective's tensor any later
"""
HANDLED = """
class Boom(nn.Linear):
    def forward(self, x):
        if dist.get_rank() == 1:
            raise ValueError("boom in layer")
        return super().forward(x)

mesh = samo.mesh(pipe=3)
dist.new_group([0, 1])  # a group that not all ranks are in: torch's names of groups differ now
layers = [Boom(8, 8) for _ in range(3)]
pipeline = samo.Pipeline(layers, nn.functional.mse_loss, mesh, 2, timeout_s=20)
try:
    pipeline.step(torch.ones(4, 8), target=torch.ones(4, 8))
except (ValueError, samo.PeerError) as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("program", "num_ranks", "said"),
    [
        (NOT_CLOSED, 2, {}),
        pytest.param(
            HANDLED,
            3,
            dict.fromkeys((0, 2), "rank 1 (stage 1 of 3) ValueError: boom in layer"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a pipeline that is not closed", "a failure that is handled"],
)
def test_a_program_ends_with_its_own_exit_code(
    program: str, num_ranks: int, said: dict[int, str]
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": num_ranks}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START + program],
            env=os.environ | {k: str(v) for k, v in {**place, "RANK": rank}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    found = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, found
    for rank, text in said.items():
        assert text in found[rank]
