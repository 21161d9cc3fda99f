"""The masks of a run: how sparse each tensor is, and what its mask looks like.

torch is imported when a run has masks to show, and not before.
"""

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from samo.errors import SamoError
from samo.report.figures import Size
from samo.report.theme import LIGHT, new_figure, place
from samo.utils import formatting

if TYPE_CHECKING:
    from samo.mask.mask import Mask
    from samo.mask.masks import Masks

__all__ = []

MOST_BARS: Final = 24
"""Tensors that are shown as bars; more become a heat map of layer and kind."""
ZOOM: Final = 64
"""Bits of a zoom, each way."""

_PICTURES: Final = 4
_BLOCK: Final = 8
"""Smallest side of a block of the density map: averages over fewer than 64 weights are noise."""
_MOST_BLOCKS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One pruned tensor, as far as the report shows it."""

    name: str
    kept: int
    numel: int

    @property
    def sparsity(self) -> float:
        """Fraction pruned."""
        return 1.0 - self.kept / self.numel if self.numel else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A mask seen from afar and from near, as PNG files in data URLs."""

    name: str
    rows: int
    columns: int
    block: tuple[int, int]
    """Rows and columns of weights that one pixel of the map averages."""
    lowest: float
    highest: float
    """Density of the emptiest and of the fullest block."""
    map_url: str
    zoom_url: str
    zoom: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskView:
    """What is shown of the masks of a run."""

    fingerprint: str
    tensors: Sequence[Tensor]
    pictures: Sequence[Picture]


def read_masks(run: Path) -> MaskView | str:
    """Read the masks of a run; a string says why there are none to show."""
    path = run / "masks.safetensors"
    if not path.exists():
        return "there is no masks.safetensors"
    from samo.checkpoint.load import load_masks

    try:
        return _view(load_masks(path))
    except (SamoError, OSError) as error:
        return str(error)


def _view(masks: "Masks") -> MaskView:
    names = sorted(masks, key=_natural)  # a file has blocks.10 before blocks.2
    chosen = _chosen([name for name in names if masks[name].numel])
    return MaskView(
        fingerprint=masks.fingerprint(),
        tensors=[Tensor(name=n, kept=masks[n].kept, numel=masks[n].numel) for n in names],
        pictures=[picture(name, masks[name]) for name in chosen],
    )


def _chosen(names: Sequence[str]) -> list[str]:
    """Pick a few tensors from the first to the last, of different kinds where there are some."""
    chosen: list[str] = []
    for i in range(min(_PICTURES, len(names))):
        target = i * (len(names) - 1) / max(1, _PICTURES - 1)
        used = {_place(name)[0] for name in chosen}
        rest = [
            (_place(n)[0] in used, abs(k - target), n)
            for k, n in enumerate(names)
            if n not in chosen
        ]
        chosen.append(min(rest)[2])
    return sorted(chosen, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in names by their value."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


def picture(name: str, mask: "Mask") -> Picture:
    """Draw a mask as a density map and a zoom; leading dimensions count as rows."""
    columns = mask.shape[-1] if mask.shape else 1
    rows = mask.numel // columns
    density, block = density_map(mask, rows, columns)
    bits = np.stack(
        [_bits(mask, row * columns, min(ZOOM, columns)) for row in range(min(ZOOM, rows))]
    )
    highest = float(density.max())
    return Picture(
        name=name,
        rows=rows,
        columns=columns,
        block=block,
        lowest=float(density.min()),
        highest=highest,
        map_url=_png(density / highest if highest else density),
        zoom_url=_png(bits.astype(np.float64)),
        zoom=bits.shape,
    )


def density_map(
    mask: "Mask", rows: int, columns: int
) -> tuple[NDArray[np.float64], tuple[int, int]]:
    """Return the density of each block of a mask, and the size of a block.

    One row of blocks is unpacked at a time, so that no temporary grows with the tensor.
    """
    high, wide = (max(_BLOCK, -(-n // _MOST_BLOCKS)) for n in (rows, columns))
    high, wide = min(high, rows), min(wide, columns)
    tops, lefts = np.arange(0, rows, high), np.arange(0, columns, wide)
    density = np.empty((len(tops), len(lefts)))
    widths = np.diff(np.append(lefts, columns))
    for i, top in enumerate(tops):
        number = min(high, rows - int(top))
        bits = _bits(mask, int(top) * columns, number * columns).reshape(number, columns)
        density[i] = np.add.reduceat(bits.sum(0, dtype=np.int64), lefts) / (number * widths)
    return density, (high, wide)


def _bits(mask: "Mask", start: int, number: int) -> NDArray[np.bool_]:
    from samo.mask import bitmap

    aligned = start // bitmap.WORD_BITS * bitmap.WORD_BITS
    bits = bitmap.unpack(mask.words, aligned, start + number)[start - aligned :]
    array: NDArray[np.bool_] = bits.cpu().numpy()
    return array


def _png(opacity: NDArray[np.float64]) -> str:
    """Return a picture in one colour, as a data URL: transparent pixels suit a light and a dark page."""
    pixels = np.empty((*opacity.shape, 4), dtype=np.uint8)
    accent = LIGHT["accent"].removeprefix("#")
    pixels[..., :3] = [int(accent[i : i + 2], 16) for i in (0, 2, 4)]
    pixels[..., 3] = np.rint(255 * opacity)
    buffer = io.BytesIO()
    imsave(buffer, pixels, format="png", metadata={"Software": None})  # type: ignore[dict-item]
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def finding(tensors: Sequence[Tensor]) -> str:
    """Say how the sparsity is spread over the tensors."""
    low = min(tensors, key=lambda tensor: tensor.sparsity)
    high = max(tensors, key=lambda tensor: tensor.sparsity)
    if formatting.percent(low.sparsity) == formatting.percent(high.sparsity):
        each = f"All {len(tensors):,} pruned tensors are" if len(tensors) > 1 else "One tensor is"
        return f"{each} {formatting.percent(low.sparsity)} sparse"
    return (
        f"Sparsity runs from {formatting.percent(low.sparsity)} in {low.name} to "
        f"{formatting.percent(high.sparsity)} in {high.name}"
    )


def sparsity_figure(tensors: Sequence[Tensor], size: Size) -> Figure:
    """Draw the sparsity of each tensor: bars, or a heat map if there are many."""
    if len(tensors) <= MOST_BARS:
        return _bars(tensors, size)
    return _heat_map(*grid(tensors), size)


def _bars(tensors: Sequence[Tensor], size: Size) -> Figure:
    letters = 30 if size.is_wide else 44
    names = [formatting.shortened(tensor.name, letters) for tensor in tensors]
    pitch = 24 if size.is_wide else 38
    figure = new_figure(size.width, pitch * len(tensors) + 26)
    left = 14 + 6.9 * max(map(len, names)) if size.is_wide else 0
    counts = max(len(f"{tensor.kept:,} of {tensor.numel:,}") for tensor in tensors)
    right = 62 + 6.6 * counts if size.is_wide else 50
    axes = place(figure, left=left, right=right, top=22, bottom=4)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(tensors) - 0.5, -0.5)
    height = 0.5 if size.is_wide else 0.3
    for row, (name, tensor) in enumerate(zip(names, tensors)):
        middle = row if size.is_wide else row + 0.22
        density = 1 - tensor.sparsity
        axes.barh(middle, 1, height=height, color=LIGHT["line"])
        axes.barh(middle, density, height=height, color=LIGHT["accent"])
        if size.is_wide:
            _write(axes, name, 0, middle, shift=-8, align="right")
        else:
            _write(axes, name, 0, row - 0.2, shift=0, align="left")
        texts: list[tuple[float, str, str]] = [(46, f"{100 * tensor.sparsity:.1f} %", "ink")]
        if size.is_wide:
            texts.append((right - 2, f"{tensor.kept:,} of {tensor.numel:,}", "muted"))
        for shift, text, role in texts:
            _write(axes, text, 1, middle, shift=shift, align="right", colour=LIGHT[role])
    top = -0.5 if size.is_wide else -0.55
    for x, text, align in ((0.0, "kept", "left"), (1.0, "pruned", "right")):
        role = "accent" if text == "kept" else "muted"
        axes.text(
            x, top, text, ha=align, va="bottom", color=LIGHT[role], fontsize=11, weight="bold"
        )
    return figure


def _write(
    axes: Axes,
    text: str,
    x: float,
    y: float,
    *,
    shift: float,
    align: Literal["left", "right"],
    colour: str = LIGHT["ink"],
) -> None:
    """Write beside a bar, ``shift`` pixels from a place on it."""
    axes.annotate(
        text,
        (x, y),
        xytext=(shift, 0),
        textcoords="offset points",
        ha=align,
        va="center",
        color=colour,
        fontsize=11,
        annotation_clip=False,
    )


def grid(
    tensors: Sequence[Tensor],
) -> tuple[list[str], list[str], Mapping[tuple[str, str], Tensor]]:
    """Sort tensors by kind and layer: the first number in a name is its layer, the rest its kind.

    Example:
        >>> from samo.report.mask_pictures import Tensor, grid
        >>> names = ["blocks.0.mlp.weight", "blocks.1.mlp.weight", "blocks.1.out.weight", "head.weight"]
        >>> kinds, layers, cells = grid([Tensor(name=name, kept=1, numel=4) for name in names])
        >>> kinds, layers
        (['mlp', 'out', 'head'], ['0', '1', ''])
        >>> cells["mlp", "1"].sparsity
        0.75
    """
    places = [_place(tensor.name) for tensor in tensors]
    if (
        len({kind for kind, _ in places}) > MOST_BARS
    ):  # experts have numbers too: take them together
        places = [(re.sub(r"(?<![^.])\d+(?![^.])", "*", kind), layer) for kind, layer in places]
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for key, tensor in zip(places, tensors):
        kept, numel = sums.get(key, (0, 0))
        sums[key] = kept + tensor.kept, numel + tensor.numel
    kinds = list(dict.fromkeys(kind for kind, _ in places))
    numbers = sorted({int(layer) for _, layer in places if layer})
    layers = [*map(str, numbers), *([""] if any(not layer for _, layer in places) else [])]
    cells = {key: Tensor(name=".".join(key), kept=k, numel=n) for key, (k, n) in sums.items()}
    return kinds, layers, cells


def _place(name: str) -> tuple[str, str]:
    """Return kind and layer of a tensor."""
    parts = name.removesuffix(".weight").split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal() and part.isascii()), None)
    if number is None:
        return ".".join(parts), ""
    return ".".join(parts[number + 1 :]) or parts[0], str(int(parts[number]))


def _heat_map(
    kinds: Sequence[str], layers: Sequence[str], cells: Mapping[tuple[str, str], Tensor], size: Size
) -> Figure:
    letters = 26 if size.is_wide else 14
    names = [formatting.shortened(kind, letters) for kind in kinds]
    left = 14 + 6.9 * max(map(len, names))
    pitch = 30
    figure = new_figure(size.width, pitch * len(kinds) + 62)
    axes = place(figure, left=left, right=6, top=26, bottom=36)
    values = [cell.sparsity for cell in cells.values()]
    low, high = min(values), max(values)
    room = (size.width - left - 6) / len(layers)
    for (kind, layer), cell in cells.items():
        x, y = layers.index(layer), kinds.index(kind)
        share = (cell.sparsity - low) / (high - low) if high - low > 0.0005 else 0.5
        axes.add_patch(
            Rectangle(
                (x - 0.5, y - 0.5),
                1,
                1,
                facecolor=LIGHT["accent"],
                alpha=0.12 + 0.78 * share,
                edgecolor=LIGHT["page"],
                linewidth=0.8 if room > 6 else 0.2,
            )
        )
        if room >= 42:
            colour = LIGHT["page"] if share > 0.6 else LIGHT["ink"]
            text = f"{100 * cell.sparsity:.1f}"
            axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=10.5)
    axes.set_xlim(-0.5, len(layers) - 0.5)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_yticks(range(len(kinds)), names, color=LIGHT["ink"])
    every = max(1, math.ceil(len(layers) * (34 if size.is_wide else 40) / (size.width - left)))
    ticks = range(0, len(layers), every)
    axes.set_xticks(ticks, [layers[i] or "none" for i in ticks])
    axes.set_xlabel("layer", fontsize=11)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _scale(axes, low, high)
    return figure


def _scale(axes: Axes, low: float, high: float) -> None:
    """Say above the map what pale and dark mean."""
    text = f"sparsity, %: pale {100 * low:.1f}, dark {100 * high:.1f}"
    axes.annotate(
        text,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 9),
        textcoords="offset points",
        color=LIGHT["muted"],
        fontsize=11,
    )
