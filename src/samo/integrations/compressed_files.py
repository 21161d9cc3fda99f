"""The files of a compressed folder, which may come from a stranger.

config.json          "quantization_config": {"quant_method": "samo", "version": 1}
model.safetensors    the state dict of a compressed model: of each pruned weight the values, 1-D,
                     under its own name, and its bitmap under NAME_bitmap
"""

from pathlib import Path

from torch import Tensor, nn

from samo.core.modules import BITMAP, from_bytes
from samo.errors import CheckpointError, nearest
from samo.integrations import folder_files
from samo.integrations.folder_files import FLOATS, Spec
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters

__all__ = []


def read_masks(model: nn.Module, specs: dict[str, Spec]) -> Masks:
    """Return the masks in the files of a compressed folder."""
    own = dense_parameters(model)
    found: dict[str, Mask] = {}
    first: dict[int, str] = {}  # of a tied weight, whose bitmap a file has under each of its names
    for name, param in own.items():
        first.setdefault(id(param), name)
    for name, spec in specs.items():
        weight = name.removesuffix(BITMAP)
        if weight == name:
            continue
        if weight not in own:
            raise _misfit(spec.file, f"'{name}' is of no weight{nearest(weight, own)}")
        if spec.dtype != "U8" or len(spec.shape) != 1:
            raise _misfit(spec.file, f"'{name}' is {spec.dtype} {spec.shape}, not a list of bytes")
        mask = from_bytes(weight, folder_files.read_tensor(spec, name), own[weight].shape)
        other = first[id(own[weight])]
        if found.setdefault(other, mask) != mask:
            raise _misfit(spec.file, f"'{name}' is not that of '{other}', which is the same weight")
    if not found:
        raise CheckpointError(
            f"'{_folder(specs)}' has no bitmaps, so it is not compressed; remove "
            "quantization_config from its config.json"
        )
    return Masks(found)


def check_specs(model: nn.Module, specs: dict[str, Spec]) -> None:
    """Refuse files that do not hold what a compressed model needs, before they take memory."""
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, (dtype, shape, file) in specs.items():
        if name not in own:
            raise _misfit(file, f"the model has no '{name}'{nearest(name, own)}")
        wanted = tuple(own[name].shape)
        if shape != wanted:
            raise _misfit(file, f"'{name}' has shape {shape} in the file, {wanted} in the model")
        if own[name].is_floating_point() != (dtype in FLOATS):
            raise _misfit(file, f"'{name}' is {dtype} in the file, {own[name].dtype} in the model")
    there = {id(own[name]) for name in specs}
    for name, value in own.items():
        if id(value) not in there and not name.endswith(BITMAP):
            raise CheckpointError(f"'{_folder(specs)}' is not complete: '{name}' is missing")


def _folder(specs: dict[str, Spec]) -> Path | str:
    return next((spec.file.parent for spec in specs.values()), "")


def _misfit(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"'{file}' does not fit its config.json: {what}; download it again")
