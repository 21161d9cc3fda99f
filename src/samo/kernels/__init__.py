"""The operations on compressed tensors, and which implementation runs them.

Four operations carry everything else; the first three read the mask's bits block by block:

    compress_       dense tensor -> vector of its kept entries
    expand_         vector of kept entries -> dense tensor with exact zeros
    adamw_          one AdamW update of parameters, and of the dense copies that are made of them
    find_nonfinite  is any entry of some tensors NaN or infinite?

``reference`` does them in plain torch on any device and defines what is right; ``cpu`` is the fast
path of a CPU and ``triton_launch`` that of an NVIDIA GPU. An implementation for another device is
one more module with these four functions (`Kernels`) and one more line in `choose`.
"""

from samo.kernels.dispatch import PATHS, Path, choose
from samo.kernels.protocol import AdamWSettings, AdamWUpdate, Kernels

__all__ = ["PATHS", "AdamWSettings", "AdamWUpdate", "Kernels", "Path", "choose"]
