"""The operations on compressed tensors, and which implementation runs them.

    compress_       dense tensor -> vector of its kept entries
    expand_         vector of kept entries -> dense tensor with exact zeros
    adamw_          one AdamW update of parameters and of their dense copies
    find_nonfinite  is any entry of some tensors NaN or infinite?

``reference`` implements them in plain torch on any device and defines what is right; ``cpu`` and
``triton_launch`` are the fast paths for a CPU and an NVIDIA GPU. To support another device, write a
module with these four functions (`Kernels`) and add it to `dispatch.choose`.
"""

from samo.kernels.dispatch import PATHS, Path, choose
from samo.kernels.protocol import AdamWSettings, AdamWUpdate, Kernels

__all__ = ["PATHS", "AdamWSettings", "AdamWUpdate", "Kernels", "Path", "choose"]
