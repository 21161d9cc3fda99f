"""Mask files: safetensors, with the shapes and a fingerprint in their metadata.

    tensors    parameter name -> words of its bitmap, int32
    metadata   format "samo-masks", version, shapes (JSON), fingerprint of all names, shapes and bits

The counts of a bitmap follow from its words and are not written. Names stand in alphabetical order, so
that equal masks are equal bytes. A file is written whole or not at all.
"""

import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from samo.errors import MaskError
from samo.utils import atomic_io

__all__ = []

_FORMAT: Final = "samo-masks"
_VERSION: Final = "1"


class MaskFile(NamedTuple):
    """What a mask file holds; nothing in it has been compared with anything else."""

    words: dict[str, Tensor]
    shapes: dict[str, Any]
    fingerprint: str


def write(path: str | os.PathLike[str], content: MaskFile) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of either.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    target = Path(os.path.realpath(path))  # through a link, which stays
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write '{target}': there is no folder '{target.parent}'")
    atomic_io.write_bytes(target, encode(content))


def encode(content: MaskFile) -> bytes:
    """Return the bytes of a file; the same ones for the same content, in whatever order it comes.

    safetensors' own ``save`` writes metadata in an order that changes from call to call.
    """
    header: dict[str, Any] = {
        "__metadata__": {
            "format": _FORMAT,
            "version": _VERSION,
            "shapes": json.dumps(content.shapes, sort_keys=True),
            "fingerprint": content.fingerprint,
        }
    }
    pieces: list[bytes] = []
    end = 0
    for name, words in sorted(content.words.items()):
        pieces.append(words.cpu().numpy().tobytes())
        begin, end = end, end + len(pieces[-1])
        header[name] = {"dtype": "I32", "shape": list(words.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def read(path: str | os.PathLike[str]) -> MaskFile:
    """Read a file of this format and version.

    Raises:
        MaskError: The file is missing, cannot be read, or is of another kind or version.
    """
    path = Path(path)
    if not path.is_file():
        if path.is_dir():
            raise MaskError(
                f"'{path}' is a folder; samo.load_masks reads the masks of a checkpoint"
            )
        raise MaskError(f"mask file '{path}' does not exist; write one with Masks.save(path)")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            words = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise MaskError(
            f"'{path}' is not a mask file: {error}; it is damaged or of another kind, write it again "
            "with Masks.save(path)"
        ) from None
    if metadata.get("format") != _FORMAT:
        raise MaskError(
            f"'{path}' is not a mask file: its format is {metadata.get('format')!r}, not {_FORMAT!r}; "
            "for the weights of a pruned model use Masks.from_zeros(model)"
        )
    if metadata.get("version") != _VERSION:
        raise MaskError(
            f"mask file '{path}' has version {metadata.get('version')!r}, this samo reads version "
            f"{_VERSION!r}; update samo"
        )
    try:
        shapes = json.loads(metadata["shapes"])
    except (KeyError, ValueError, RecursionError):
        shapes = None
    if not isinstance(shapes, dict):
        raise MaskError(
            f"mask file '{path}' is damaged: its shapes cannot be read; take another copy of it"
        )
    return MaskFile(words, shapes, metadata.get("fingerprint", ""))
