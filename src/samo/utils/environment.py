"""Versions and hardware, for the records of runs and for ``samo inspect``."""

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any, Final

import torch

from samo import __version__

_PACKAGES: Final = ("numpy", "numba", "safetensors", "triton", "transformers")


def versions() -> dict[str, str]:
    """Return the versions of samo, Python and samo's dependencies, if installed."""
    found = {"samo": __version__, "python": platform.python_version()}
    # torch's own version names its build, such as +cu130, where its package may not.
    found["torch"] = str(torch.__version__)
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """Describe a device and its machine."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = _cpu_name(), _total_memory()
    return {
        "device": device.type,
        "device_name": name,
        "memory_bytes": memory,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def memory_in_use(device: torch.device) -> int:
    """Return the resident bytes of the process on a CPU, the peak allocation on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the peak, in bytes on macOS
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _total_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, of a GPU or of the host."""
    # torch's CPU allocator raises a plain RuntimeError; only its name tells it from others.
    is_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)
