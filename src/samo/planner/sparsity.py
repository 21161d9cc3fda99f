"""How far a model is pruned: by masks in hand, or by the files of a Hugging Face folder.

No torch is loaded. Bits of masks.safetensors are counted. In folders with bitmaps beside kept
values, the shapes in the headers say it.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from samo.errors import ConfigError
from samo.planner.configs import read_json
from samo.planner.network import Kind, Network
from samo.utils import untrusted

if TYPE_CHECKING:
    from samo.mask.masks import Masks

# Written by packages that load torch, so the names are repeated here; tests write real folders.
_MASKS: Final = "masks.safetensors"
_BITMAPS: Final = (("_bitmap", "", 32), (".bitmask", ".compressed", 0))
"""Ends of the names of bits and of kept values, and the bytes of a digest behind the bits."""


def pruned_as_read(path: Path, network: Network) -> tuple[Network, str] | None:
    """Return the network with the sparsity of a folder, and where it is from; None if nowhere.

    Raises:
        ConfigError: A file is damaged, or it is not of this network.
    """
    folder = path if path.is_dir() else path.parent
    masks = folder / _MASKS
    # A dense folder has no bitmaps: its weights, perhaps not downloaded yet, are left alone.
    is_dense = "quantization_config" not in read_json(path)
    weights = [] if is_dense else sorted(folder.glob("model*.safetensors"))
    files = [masks] if os.path.lexists(masks) else weights
    pruned: Counter[tuple[str, int]] = Counter()
    for file in files:
        try:
            pruned.update(_mask_file(file) if file == masks else _weight_file(file))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = (error.strerror if isinstance(error, OSError) else "") or str(error)
            raise ConfigError(
                f"'{file}' cannot be read: {what}; set --sparsity to plan without it"
            ) from None
    if not pruned:
        return None
    try:
        found = _pruned_as_counted(network, pruned)
    except ConfigError as error:
        raise ConfigError(
            f"the masks of '{folder}' are not of its model: {error}; set --sparsity"
        ) from None
    return found, _MASKS if files == [masks] else "the bitmaps of the folder"


def pruned_by_masks(network: Network, masks: "Masks") -> Network:
    """Return the network with what masks prune of each kind of matrix."""
    pruned = {(name, len(mask.shape)): mask.numel - mask.kept for name, mask in masks.items()}
    return _pruned_as_counted(network, pruned)


def _pruned_as_counted(network: Network, pruned: Mapping[tuple[str, int], int]) -> Network:
    """Return the network with sparsities; ``pruned`` counts weights by name and dimensions."""
    count: Counter[Kind] = Counter()
    for (name, dims), number in pruned.items():
        count[_kind(name.lower(), dims)] += number
    whole: Counter[Kind] = Counter()
    for matrix in network.matrices:
        whole[matrix.kind] += matrix.numel
    return network.pruned(0.0, {kind: count[kind] / whole[kind] for kind in whole})


def _kind(name: str, dims: int) -> Kind:
    if dims == 3 or ".experts." in name:
        return "experts"
    if "attn" in name or "attention" in name:
        return "attention"
    if "embed" in name or "wte" in name or "wpe" in name:
        return "embedding"
    return "head" if "head" in name else "mlp"


def _mask_file(path: Path) -> dict[tuple[str, int], int]:
    """Count the bits of samo's mask file."""
    found = {}
    with _opened(path) as file:
        shapes = untrusted.parse_json(file.metadata()["shapes"].encode())
        for name, shape in shapes.items():
            kept = int.from_bytes(file.get_tensor(name).tobytes()).bit_count()
            found[name, len(shape)] = math.prod(shape) - kept
    return found


def _weight_file(path: Path) -> dict[tuple[str, int], int]:
    """Take the weights with a bitmap beside their kept values."""
    found = {}
    with _opened(path) as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name, size in sizes.items():
        for suffix, values, digest in _BITMAPS:
            weight = name.removesuffix(suffix)
            if name.endswith(suffix) and weight + values in sizes:
                found[weight, 2] = 8 * (size - digest) - sizes[weight + values]
    return found


def _opened(path: Path) -> Any:
    """Open a safetensors file, or a link of the hub's cache to one of the same repository."""
    file = path.resolve()
    is_cached = file.parent == path.parent.resolve().parent.parent / "blobs"
    untrusted.check_file(file if is_cached else path)
    return safe_open(file, framework="numpy")
