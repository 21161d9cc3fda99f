"""GPUs, links and clusters: a table of data sheets, and files of the same form.

A bandwidth is in bytes per second and one direction, FLOP/s are those of dense 16-bit products with
fp32 accumulation. Fractions say how much of a data sheet a training step achieves: those of the
H200 are fitted to measured steps (docs/plan.md), all others are assumed. Memory is what CUDA
reports.
"""

import json
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from samo.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Link:
    """A connection: a message of n bytes takes ``latency_s + n / bandwidth``."""

    bandwidth: float
    latency_s: float = 5e-6

    def seconds(self, num_bytes: float, flows: float = 1.0) -> float:
        """Return the time of a message, if so many flows share the link."""
        return self.latency_s + num_bytes * flows / self.bandwidth

    def achieved(self, fraction: float) -> "Link":
        """Return the link with a fraction of its bandwidth."""
        return Link(self.bandwidth * fraction, self.latency_s)


_PCIE_4: Final = Link(25e9, 1e-5)
_PCIE_5: Final = Link(50e9, 1e-5)
_ETHERNET_10G: Final = Link(1.25e9, 5e-5)
_INFINIBAND_S: Final = 1e-5

PROCESS_BYTES: Final = 1e9
"""Memory of a process on a CPU besides tensors, with torch and transformers: assumed."""
_MAY_BE_ZERO: Final = ("overlap", "launch_s", "latency_s", "reserved_bytes")
_HUGE: Final = 1e300


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One kind of GPU, or a machine that `samo plan --measure` has timed."""

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float  # of its memory
    gpus_per_node: int = 8
    intra: Link = _PCIE_4  # between two GPUs of a node
    inter: Link = _ETHERNET_10G  # between two nodes: the GPUs of a node share it
    flops_fraction: float = 0.8
    bandwidth_fraction: float = 0.85
    link_fraction: float = 0.8
    overlap: float = 1.0  # of computing, that can hide communication: 0 if both need the CPU
    launch_s: float = 1e-5  # host time of an operator: a step is never faster than its host
    reserved_bytes: float = 0.8e9  # CUDA context, cuBLAS workspace, NCCL buffers
    expand: float = 1.15
    compress: float = 1.05
    update: float = 1.35
    update_lean: float = 2.8
    update_dense: float = 1.3
    """Time of a kernel over that of copying as many bytes: measured on an H200."""
    dtype: str = "bfloat16"  # that `flops` is of
    source: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ConfigError(f"hardware '{self.name}': no flops of dtype {self.dtype!r} are known")
        for part in (self, self.intra, self.inter):
            _check_numbers(self.name, part)

    @property
    def achieved_flops(self) -> float:
        """FLOP/s of a product in a training step."""
        return self.flops * self.flops_fraction

    @property
    def achieved_bandwidth(self) -> float:
        """Bytes per second of all else."""
        return self.bandwidth * self.bandwidth_fraction

    @property
    def usable_bytes(self) -> float:
        """Memory that a step may take."""
        return self.memory_bytes - self.reserved_bytes


def _check_numbers(name: str, part: Hardware | Link) -> None:
    """Refuse what cannot be computed with."""
    for field in fields(part):
        value = getattr(part, field.name)
        if field.type not in (int, float):
            continue
        is_number = isinstance(value, int if field.type is int else int | float)
        is_right = is_number and 0 <= value <= _HUGE
        if not is_right or not (value or field.name in _MAY_BE_ZERO):
            raise ConfigError(f"hardware '{name}': {field.name} must be over 0, got {value!r:.40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A number of equal GPUs. Ranks fill one node after the other."""

    hardware: Hardware
    num_gpus: int = 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs that share a node."""
        return min(self.hardware.gpus_per_node, self.num_gpus)

    @property
    def intra(self) -> Link:
        """The achieved link inside a node."""
        return self.hardware.intra.achieved(self.hardware.link_fraction)

    @property
    def inter(self) -> Link:
        """The achieved link of a node."""
        return self.hardware.inter.achieved(self.hardware.link_fraction)


_V100: Final = Hardware(
    name="v100-32", memory_bytes=34.1e9, flops=125e12, bandwidth=900e9,
    intra=Link(150e9), inter=Link(50e9, _INFINIBAND_S),
    flops_fraction=0.7, dtype="float16",
    source="V100 SXM2 data sheet; DGX-1: 4 x 100 Gbit/s a node",
)  # fmt: skip
_A100: Final = Hardware(
    name="a100-80", memory_bytes=85.0e9, flops=312e12, bandwidth=2039e9,
    intra=Link(300e9), inter=Link(200e9, _INFINIBAND_S),
    source="A100 SXM4 data sheet; DGX A100: 8 x 200 Gbit/s a node",
)  # fmt: skip
_H200: Final = Hardware(
    name="h200", memory_bytes=150.1e9, flops=989.4e12, bandwidth=4800e9,
    intra=Link(450e9), inter=Link(400e9, _INFINIBAND_S),
    flops_fraction=0.84, bandwidth_fraction=0.88, launch_s=2e-5,
    source="H200 SXM data sheet; fractions and memory measured; DGX: 8 x 400 Gbit/s a node",
)  # fmt: skip
_RTX_4090: Final = Hardware(
    name="rtx4090", memory_bytes=25.4e9, flops=165.2e12, bandwidth=1008e9, gpus_per_node=4,
    source="Ada GPU architecture white paper (fp16, fp32 accumulate); PCIe 4 x16; 10 Gbit/s",
)  # fmt: skip

HARDWARE: Final[dict[str, Hardware]] = {
    one.name: one
    for one in (
        replace(_V100, name="v100-16", memory_bytes=16.9e9),
        _V100,
        replace(_A100, name="a100-40", memory_bytes=42.3e9, bandwidth=1555e9),
        _A100,
        replace(
            _H200, name="h100", memory_bytes=85.0e9, bandwidth=3350e9,
            source="H100 SXM data sheet; fractions of the H200; DGX: 8 x 400 Gbit/s a node",
        ),
        _H200,
        replace(
            _H200, name="b200", memory_bytes=191e9, flops=2250e12, bandwidth=8000e9,
            intra=Link(900e9),
            source="HGX B200 data sheet; fractions of the H200; 8 x 400 Gbit/s a node",
        ),
        replace(
            _RTX_4090, name="rtx3090", flops=71e12, bandwidth=936e9,
            source="GA102 white paper (fp16, fp32 accumulate); PCIe 4 x16; 10 Gbit/s",
        ),
        _RTX_4090,
        replace(
            _RTX_4090, name="rtx5090", memory_bytes=33.7e9, flops=209.5e12, bandwidth=1792e9,
            intra=_PCIE_5,
            source="RTX Blackwell white paper (fp16, fp32 accumulate); PCIe 5 x16; 10 Gbit/s",
        ),
        Hardware(
            name="laptop-8gb", memory_bytes=8.58e9, flops=29e12, bandwidth=256e9, gpus_per_node=1,
            inter=Link(0.125e9, 1e-4), reserved_bytes=1.2e9,
            source="RTX 4060 Laptop, 1/8 of its 233 sparse 8-bit TOPS; shows its desktop; 1 Gbit/s",
        ),
    )
}  # fmt: skip
"""What `--gpu` knows, by name."""


def find_hardware(name: str | Path) -> Hardware:
    """Return a GPU of the table, by memory ("24GB"), "here" for this machine, or that of a file.

    Raises:
        ConfigError: There is no such GPU, or the file is wrong.
    """
    path = Path(name)
    if path.suffix in (".toml", ".json"):
        return _read(path)
    if name == "here":
        from samo.planner.this_machine import this_hardware  # loads torch

        return this_hardware()
    key = str(name).lower().replace("_", "-").replace(" ", "")
    if (memory := re.fullmatch(r"(\d+(?:\.\d+)?)gi?b", key)) and float(memory[1]) > 0:
        return _unnamed(float(memory[1]))
    if key not in HARDWARE:
        guess = nearest(key, HARDWARE)
        raise ConfigError(
            f"unknown GPU '{name}'{guess}; choose among {', '.join(HARDWARE)}, 24GB for any "
            "card of 24 GB, here for this machine, or a .toml or .json file of your own"
        )
    return HARDWARE[key]


def _unnamed(label: float) -> Hardware:
    """Return a card of so many GB, as cards are sold: GiB, of which the driver keeps 1.5 %."""
    memory = 0.985 * label * 2**30
    known = [one for one in HARDWARE.values() if one.dtype == "bfloat16"]
    near = min(known, key=lambda one: (abs(one.memory_bytes - memory), one.flops))
    source = (
        f"any card of {label:g} GB: the rates of the {near.name}, the nearest known, are assumed"
    )
    return replace(near, name=f"{label:g}GB", memory_bytes=memory, source=source)


def match_hardware(device_name: str, memory_bytes: float) -> Hardware:
    """Return the GPU of the table that a device of this name is, with its own memory.

    A GPU that is not in the table gets the rates of the RTX 4090, and its source says so: which
    layouts fit does not depend on rates.
    """
    name = re.sub(r"\brtx (?=\d)", "rtx", device_name.lower())

    def is_named(key: str) -> bool:
        chip = "laptop" if "laptop" in name else key.partition("-")[0]
        return key.startswith(chip) and re.search(rf"\bg?{chip}(?!\d)", name) is not None

    found = [one for key, one in HARDWARE.items() if is_named(key)]
    if not found:
        source = f"{device_name}: not in the table, so the rates of an RTX 4090 are assumed"
        return replace(_RTX_4090, name="gpu", memory_bytes=memory_bytes, source=source)
    near = min(found, key=lambda one: abs(one.memory_bytes - memory_bytes))
    return replace(near, memory_bytes=memory_bytes)


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Write a file that `find_hardware` reads."""
    path.write_text(json.dumps(asdict(hardware), indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> Hardware:
    try:
        text = path.read_text(encoding="utf-8")
        found: dict[str, Any] = (tomllib if path.suffix == ".toml" else json).loads(text)
        known = [entry.name for entry in fields(Hardware)]
        for key in found:
            if key not in known:
                raise ValueError(
                    f"unknown key '{key}'{nearest(key, known)}; it takes {', '.join(known)}"
                )
        for key in {"intra", "inter"} & {*found}:
            found[key] = Link(**found[key])
        return Hardware(**{"name": path.stem, **found})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"hardware file '{path}': {what}") from None
