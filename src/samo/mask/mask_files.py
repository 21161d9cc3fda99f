"""Mask files: safetensors, with the shapes and a fingerprint in their metadata.

tensors    parameter name -> words of its bitmap, int32; sorted: equal masks are equal bytes
metadata   format "samo-masks", version, shapes (JSON), fingerprint of names, shapes and bits
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors import safe_open

from samo.errors import MaskError
from samo.mask.mask import Mask
from samo.utils import atomic_io, safetensors_io, untrusted

__all__ = []

_FORMAT: Final = "samo-masks"
_VERSION: Final = "1"


def fingerprint(masks: Mapping[str, Mask]) -> str:
    """Return the SHA-256 of all names, shapes and bits, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(masks):
        digest.update(f"{name}\0{masks[name].fingerprint()}\0".encode())
    return digest.hexdigest()


def metadata(masks: Mapping[str, Mask]) -> dict[str, str]:
    """Return the metadata of a file."""
    shapes = {name: mask.shape for name, mask in masks.items()}
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "shapes": json.dumps(shapes, sort_keys=True),
        "fingerprint": fingerprint(masks),
    }


def write(path: str | os.PathLike[str], masks: Mapping[str, Mask]) -> None:
    """Write masks to a file, atomically."""
    target = Path(os.path.realpath(path))  # through a link, which stays
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write '{target}': there is no folder '{target.parent}'")
    words = {name: masks[name].words for name in sorted(masks)}
    atomic_io.write_bytes(target, b"".join(safetensors_io.encode(words, metadata(masks))))


def read(path: str | os.PathLike[str]) -> dict[str, Mask]:
    """Return the masks of a file; raise a `MaskError` if one bit is damaged."""
    path = Path(path)
    if path.is_dir():
        raise MaskError(f"'{path}' is a folder; samo.load_masks reads the masks of a checkpoint")
    if not path.is_file():
        raise MaskError(f"mask file '{path}' does not exist; write one with Masks.save(path)")
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            words = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors_io.READ_ERRORS as error:
        raise MaskError(
            f"'{path}' is not a mask file, or it is damaged; write one with Masks.save(path) or "
            "samo prune"
        ) from error
    if found.get("format") != _FORMAT:
        raise MaskError(
            f"'{path}' is not a mask file: its format is {found.get('format')!r}, not {_FORMAT!r}; "
            "for the weights of a pruned model use Masks.from_zeros(model)"
        )
    if found.get("version") != _VERSION:
        raise MaskError(
            f"mask file '{path}' has version {found.get('version')!r}, this samo reads version "
            f"{_VERSION!r}; update samo"
        )
    try:
        shapes = untrusted.parse_json(found["shapes"].encode())
        masks = {name: Mask(shapes[name], words[name]) for name in words}
        if shapes.keys() == masks.keys() and fingerprint(masks) == found["fingerprint"]:
            return masks
    except (AttributeError, KeyError, TypeError, ValueError):  # of shapes that are none
        pass
    raise MaskError(
        f"mask file '{path}' is damaged: its contents do not match its fingerprint; use another "
        "copy"
    )
