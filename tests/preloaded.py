"""What every rank of a test needs, imported once in the process that ranks are forked from."""

import pytest
import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.distributed.pipelining
import torch.nn.parallel

import samo
from samo.checkpoint import load, save
from samo.kernels import cpu
from samo.pipeline import pipeline
from samo.pruning import prune

__all__ = [
    "cpu",
    "load",
    "pipeline",
    "prune",
    "pytest",
    "samo",
    "save",
]

torch.set_num_threads(1)


def _warm_up(dtype: torch.dtype) -> None:
    """Load the compiled kernels, once for all ranks."""
    layer = torch.nn.Linear(8, 8).to(dtype)
    model = samo.compress_(torch.nn.Sequential(layer), samo.prune(torch.nn.Sequential(layer), 0.5))
    opt = samo.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 8, dtype=dtype)).sum().backward()
    opt.step()


for _dtype in (torch.float64, torch.float32, torch.bfloat16):
    _warm_up(_dtype)
