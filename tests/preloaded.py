"""What every rank of a test needs, imported once in the process that ranks are forked from."""

import torch
import torch.distributed
import torch.distributed.device_mesh

import samo
from samo.kernels import cpu
from samo.optim import AdamW
from samo.parallel import clipping, replicas

__all__ = ["AdamW", "clipping", "cpu", "replicas", "samo"]

torch.set_num_threads(1)

for _dtype in (torch.float64, torch.float32, torch.bfloat16):  # load the compiled kernels, once for all
    _model = torch.nn.Sequential(torch.nn.Linear(8, 8).to(_dtype))
    _model = samo.compress_(_model, samo.prune(_model, 0.5))
    _opt = AdamW(samo.parameters(_model))
    for _ in range(2):
        _model(torch.ones(1, 8, dtype=_dtype)).sum().backward()
    _opt.step()
