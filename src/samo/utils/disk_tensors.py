"""Tensors in files: their memory is the system's to take back, unlike that of the process."""

import mmap
import os
import tempfile

import torch
from torch import Tensor

__all__ = []


def disk_copy(tensor: Tensor, folder: str | os.PathLike[str]) -> Tensor:
    """Return a copy of a CPU tensor in a file without a name, which ends with the tensor."""
    if not tensor.numel():
        return tensor.detach().clone()
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a full disk must show here, not as a bus error later
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        else:
            file.truncate(tensor.nbytes)
        memory = mmap.mmap(file.fileno(), tensor.nbytes)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())
