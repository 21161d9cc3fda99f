"""The layout sparse-bitmask of compressed-tensors, which its versions before 0.15 read and wrote.

Instead of ``X.weight`` a file has

    X.compressed    the nonzero values, row by row, 1-D
    X.bitmask       a bit for each entry, uint8, rows x ceil(columns / 8), least bit first
    X.row_offsets   where each row starts in X.compressed, int64
    X.shape         rows and columns, int64

and config.json has ``quantization_config.sparsity_config.format``. Kept entries that are exactly 0
are lost, so a folder of samo has its masks in masks.safetensors too.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from samo.errors import CheckpointError
from samo.integrations import folder_files
from samo.integrations.folder_files import INDEX, QUANTIZATION, WEIGHTS, Spec
from samo.utils import atomic_io, safetensors_io

METHOD: Final = "compressed-tensors"
FORMAT: Final = "sparse-bitmask"
_BITMASK: Final = ".bitmask"
_PARTS: Final = ("compressed", "bitmask", "row_offsets", "shape")


def write(folder: Path) -> None:
    """Turn a dense folder of samo's own, not yet published, into this layout, file by file."""
    weight_map: dict[str, str] = {}
    numbers = {"kept": 0, "numel": 0, "bytes": 0}
    files = folder_files.weight_files(folder)
    for file in files:
        tensors: dict[str, Tensor] = {}
        for name, spec in folder_files.read_specs([file]).items():
            dense = folder_files.read_tensor(spec, name)
            parts = _compress(dense) if name.endswith(".weight") and dense.dim() == 2 else None
            module = name.removesuffix("weight")
            tensors |= {module + part: value for part, value in (parts or {}).items()} or {
                name: dense
            }
            numbers["kept"] += (dense if parts is None else parts["compressed"]).numel()
            numbers["numel"] += dense.numel()
        file.unlink()
        atomic_io.write_new(file, safetensors_io.encode(tensors, {"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, file.name)
        numbers["bytes"] += sum(tensor.nbytes for tensor in tensors.values())
    if files != [folder / WEIGHTS]:
        index = {"metadata": {"total_size": numbers["bytes"]}, "weight_map": weight_map}
        folder_files.write_json(folder / INDEX, index)
    sparsity = {
        "format": FORMAT,
        "global_sparsity": 1 - numbers["kept"] / numbers["numel"],
        "sparsity_structure": "unstructured",
        "targets": [name.removesuffix(_BITMASK) for name in weight_map if name.endswith(_BITMASK)],
        "ignore": [],
    }
    how = {"quant_method": METHOD, "sparsity_config": sparsity}
    folder_files.edit_config(folder, **{QUANTIZATION: how})


def _compress(dense: Tensor) -> dict[str, Tensor] | None:
    """Return the parts of a matrix, unless they would take more bytes than the matrix."""
    keep = dense != 0
    counts = keep.sum(dim=-1)
    parts = {
        "compressed": dense[keep],
        "bitmask": torch.from_numpy(np.packbits(keep.numpy(), axis=-1, bitorder="little")),
        "row_offsets": counts.cumsum(0) - counts,
        "shape": torch.tensor(dense.shape),
    }
    return parts if sum(part.nbytes for part in parts.values()) < dense.nbytes else None


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder of compressed-tensors that is in another layout than this."""
    sparsity = settings.get("sparsity_config")
    found = sparsity.get("format") if isinstance(sparsity, dict) else None
    if found != FORMAT or settings.get("config_groups"):
        raise CheckpointError(
            f"'{folder}' is quantized by compressed-tensors (sparsity format {found!r}); samo "
            f"reads its format '{FORMAT}' without quantization, and dense models"
        )


def parts_of(specs: dict[str, Spec]) -> dict[str, list[str]]:
    """Return the tensors of a folder's files that make up each compressed weight."""
    modules = [name.removesuffix(_BITMASK) for name in specs if name.endswith(_BITMASK)]
    return {
        module: [name for part in _PARTS if (name := f"{module}.{part}") in specs]
        for module in modules
    }


def read(specs: dict[str, Spec]) -> dict[str, Tensor]:
    """Return the dense state dict of a folder's files, whose every part is checked."""
    modules = parts_of(specs)
    parts = {part for own in modules.values() for part in own}
    state = {n: folder_files.read_tensor(spec, n) for n, spec in specs.items() if n not in parts}
    return state | {f"{module}.weight": read_weight(module, specs) for module in modules}


def read_weight(module: str, specs: dict[str, Spec]) -> Tensor:
    """Return the dense weight of a module, whose every part is checked."""

    def damaged(what: str) -> CheckpointError:
        file = specs[f"{module}{_BITMASK}"].file
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
    unpacked = np.unpackbits(packed.numpy(), axis=-1, bitorder="little")
    bits = torch.from_numpy(unpacked).to(torch.bool)
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
