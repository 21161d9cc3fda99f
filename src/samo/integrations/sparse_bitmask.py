"""The layout sparse-bitmask of compressed-tensors, up to its version 0.14.0.1, in files.

Instead of ``X.weight`` a file has

    X.compressed    the nonzero values, row by row, 1-D
    X.bitmask       a bit for each entry, uint8, rows x ceil(columns / 8), least bit first
    X.row_offsets   where each row starts in X.compressed, int64
    X.shape         rows and columns, int64

and config.json has ``quantization_config.sparsity_config.format``. Entries that are exactly 0 are
lost, also kept ones: a folder of samo has its masks in masks.safetensors too.
"""

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from samo.errors import CheckpointError
from samo.integrations import folder_files
from samo.integrations.folder_files import INDEX, WEIGHTS, Spec
from samo.utils import atomic_io, safetensors_io

__all__ = []

METHOD: Final = "compressed-tensors"
FORMAT: Final = "sparse-bitmask"
_WEIGHT: Final = ".weight"
PARTS: Final = ("compressed", "bitmask", "row_offsets", "shape")


def write(folder: Path) -> None:
    """Turn a dense folder of samo's own, not yet published, into this layout, file by file."""
    weight_map: dict[str, str] = {}
    targets: list[str] = []
    kept = numel = size = 0
    files = folder_files.weight_files(folder)
    for file in files:
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as dense:
            for name in dense.keys():  # noqa: SIM118
                value = dense.get_tensor(name)
                parts = _compress(value) if name.endswith(_WEIGHT) and value.dim() == 2 else None
                numel += value.numel()
                kept += value.numel() if parts is None else parts["compressed"].numel()
                if parts is None:
                    tensors[name] = value.clone()
                else:
                    module = name.removesuffix(_WEIGHT)
                    targets.append(module)
                    tensors |= {f"{module}.{part}": parts[part] for part in PARTS}
        file.unlink()
        atomic_io.write_new(file, safetensors_io.encode(tensors, {"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, file.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if files != [folder / WEIGHTS]:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        folder_files.write_json(folder / INDEX, index)
    sparsity = {
        "format": FORMAT,
        "global_sparsity": 1 - kept / numel,
        "sparsity_structure": "unstructured",
        "targets": targets,
        "ignore": [],
    }
    how = {"quant_method": METHOD, "sparsity_config": sparsity}
    folder_files.edit_config(folder, **{folder_files.QUANTIZATION: how})


def _compress(dense: Tensor) -> dict[str, Tensor] | None:
    """Return the parts of a matrix, unless they would take more bytes than the matrix."""
    keep = dense != 0
    counts = keep.sum(dim=-1)
    pad = torch.nn.functional.pad(keep, (0, -keep.shape[-1] % 8))
    bits = pad.view(*pad.shape[:-1], -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
    parts = {
        "compressed": dense[keep],
        "bitmask": bits.sum(-1, dtype=torch.uint8),
        "row_offsets": counts.cumsum(0) - counts,
        "shape": torch.tensor(dense.shape),
    }
    return parts if sum(part.nbytes for part in parts.values()) < dense.nbytes else None


def check_config(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a folder of compressed-tensors that is in another layout than this."""
    quantization = config[folder_files.QUANTIZATION]
    sparsity = quantization.get("sparsity_config")
    found = sparsity.get("format") if isinstance(sparsity, dict) else None
    if found != FORMAT or quantization.get("config_groups"):
        raise CheckpointError(
            f"'{folder}' is quantized by compressed-tensors (sparsity format {found!r}); samo "
            f"reads its format '{FORMAT}' without quantization, and dense models"
        )


def read(specs: dict[str, Spec]) -> dict[str, Tensor]:
    """Return the dense state dict of a folder's files, whose every part is checked."""
    state: dict[str, Tensor] = {}
    modules = {name.removesuffix(".bitmask") for name in specs if name.endswith(".bitmask")}
    parts = {f"{module}.{part}" for module in modules for part in PARTS}
    for name, spec in specs.items():
        if name not in parts:
            state[name] = folder_files.read_tensor(spec, name)
    for module in sorted(modules):
        state[module + _WEIGHT] = read_weight(module, specs)
    return state


def read_weight(module: str, specs: dict[str, Spec]) -> Tensor:
    """Return the dense weight of a module, whose every part is checked."""

    def damaged(what: str) -> CheckpointError:
        file = specs[f"{module}.bitmask"].file
        return CheckpointError(f"'{file}' is damaged: '{module}' {what}; download the model again")

    def spec_of(part: str) -> Spec:
        if f"{module}.{part}" not in specs:
            raise damaged(f"has a .bitmask and no .{part}")
        return specs[f"{module}.{part}"]

    bitmask, sizes, compressed = map(spec_of, ("bitmask", "shape", "compressed"))
    if (sizes.dtype, sizes.shape) != ("I64", (len(bitmask.shape),)) or not bitmask.shape:
        raise damaged(f"has a .shape of {sizes.dtype} {sizes.shape}, not of int64 for each dim")
    shape = folder_files.read_tensor(sizes, f"{module}.shape").tolist()
    # The bitmask is in the file, so a shape that fits it has a size that memory can hold.
    expected = (*shape[:-1], -(-shape[-1] // 8))
    if bitmask.dtype != "U8" or bitmask.shape != expected or min(shape) < 0:
        raise damaged(f"has a .bitmask of {bitmask.dtype} {bitmask.shape} for a shape of {shape}")
    packed = folder_files.read_tensor(bitmask, f"{module}.bitmask")
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    bits = bits.flatten(-2).to(torch.bool)
    keep = bits[..., : shape[-1]]
    if bits[..., shape[-1] :].any():
        raise damaged("has bits set past the end of a row")
    kept = int(keep.sum())
    if compressed.dtype not in folder_files.FLOATS or compressed.shape != (kept,):
        raise damaged(
            f"has values of {compressed.dtype} {compressed.shape}, and its bitmask keeps {kept:,}"
        )
    values = folder_files.read_tensor(compressed, f"{module}.compressed")
    dense = torch.zeros(shape, dtype=values.dtype)
    dense[keep] = values
    return dense
