"""Images in the idx format of MNIST and Fashion-MNIST, as they are or packed by gzip.

    train-images-idx3-ubyte[.gz]    int32 0x00000803, count, rows, columns (big-endian), then bytes
    train-labels-idx1-ubyte[.gz]    int32 0x00000801, count, then a byte for each label
    t10k-images-idx3-ubyte[.gz], t10k-labels-idx1-ubyte[.gz]    the same for the test

Shape suffixes: N = images, B = images of a batch, H, W = rows and columns.
"""

import gzip
import math
import struct
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from samo.errors import DataError

__all__ = ["Images", "augmented", "centred", "read_idx", "read_images"]

SIDE: Final = 32
"""Of the images that a network sees: five halvings, as in CIFAR."""
_BORDER: Final = 4


class Images(NamedTuple):
    """Images as (N, H, W) with mean 0 and deviation 1 over the training images, and their labels."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def read_images(folder: Path, device: torch.device, limit: int | None = None) -> Images:
    """Read the four files of a folder; of each set at most ``limit`` images.

    Raises:
        DataError: A file is not there or not of this format.
    """
    parts = [
        torch.frombuffer(read_idx(folder, name), dtype=torch.uint8)[16 if "images" in name else 8 :]
        for name in (
            "train-images-idx3-ubyte",
            "train-labels-idx1-ubyte",
            "t10k-images-idx3-ubyte",
            "t10k-labels-idx1-ubyte",
        )
    ]
    images, labels = parts[::2], [part.long()[:limit].to(device) for part in parts[1::2]]
    side = math.isqrt(len(images[0]) // len(parts[1]))
    train, test = (part.view(-1, side, side)[:limit].to(device).float() / 255 for part in images)
    mean, deviation = train.mean(), train.std()
    return Images(
        _bordered((train - mean) / deviation),
        labels[0],
        _bordered((test - mean) / deviation),
        labels[1],
    )


def read_idx(folder: Path, name: str) -> bytearray:
    """Return an idx file, unpacked, after checking that its size is what its head says.

    Raises:
        DataError: It is not there or not of this format.
    """
    plain, packed = folder / name, folder / f"{name}.gz"
    if not plain.is_file() and not packed.is_file():
        raise DataError(
            f"there is neither '{plain}' nor '{packed.name}' beside it; --data is a folder with the four "
            "files of Fashion-MNIST (the Debian package dataset-fashion-mnist has them)"
        )
    data = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    dims = 3 if "idx3" in name else 1
    head = 4 + 4 * dims
    magic, *sizes = struct.unpack(f">{1 + dims}i", data[:head]) if len(data) >= head else (0,)
    expected = head + math.prod(sizes)
    if magic != 0x0800 + dims or len(data) != expected or (dims == 3 and sizes[1] != sizes[2]):
        raise DataError(
            f"'{name}' is not an idx file of {'square images' if dims == 3 else 'labels'}: its head is "
            f"{magic:#010x} with sizes {sizes} and it has {len(data):,} bytes; fetch it again"
        )
    return bytearray(data)


def augmented(images_NHW: Tensor, generator: torch.Generator) -> Tensor:
    """Cut windows at any place out of images with a border, and mirror every second one, by chance."""
    count, height = images_NHW.shape[:2]
    device = images_NHW.device
    corner_2B = torch.randint(height - SIDE + 1, (2, count, 1), generator=generator, device=device)
    rows_BH, columns_BW = corner_2B + torch.arange(SIDE, device=device)
    is_mirrored_B1 = torch.rand(count, 1, generator=generator, device=device) < 0.5
    columns_BW = torch.where(is_mirrored_B1, columns_BW.flip(1), columns_BW)
    all_B11 = torch.arange(count, device=device)[:, None, None]
    return images_NHW[all_B11, rows_BH[:, :, None], columns_BW[:, None, :]].unsqueeze(1)


def centred(images_NHW: Tensor) -> Tensor:
    """Cut the middle out of images with a border."""
    start = (images_NHW.shape[1] - SIDE) // 2
    return images_NHW[:, start : start + SIDE, start : start + SIDE].unsqueeze(1)


def _bordered(images_NHW: Tensor) -> Tensor:
    """Add a border in the colour of the images' corners, so that windows can be cut at any place."""
    wide = _BORDER + max((SIDE - images_NHW.shape[1]) // 2, 0) - 2
    return functional.pad(images_NHW, (wide,) * 4, value=float(images_NHW[:, 0, 0].median()))
