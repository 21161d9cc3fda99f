"""The README.md of an exported model: what is pruned, how much, and by what."""

from typing import Any, Final

from torch import nn

from samo import __version__
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.utils.formatting import count, percent, plain

__all__ = []


_FORMATS: Final = {
    "dense": "The weights are dense. `masks.safetensors`, if there, has the masks: a kept weight "
    "may be exactly 0.",
    "compressed": "The weights are compressed: values and bitmaps. `import samo` before "
    "`from_pretrained`; the model can be trained on as it is.",
    "bitmask": "The weights are in the layout `sparse-bitmask` of compressed-tensors, which its "
    "versions up to 0.14.0.1 and samo read; `samo export DIR --format dense` converts it. It loses "
    "kept weights that are exactly 0; `masks.safetensors` has the masks.",
}


def model_card(model: nn.Module, masks: Masks | None, name: str, layout: str) -> str:
    """Return the text of a model card."""
    dense = dense_parameters(model)
    total = sum({id(param): param.numel() for param in dense.values()}.values())
    pruned = 0 if masks is None else masks.numel - masks.kept
    lines = [
        *("---", "library_name: transformers", "tags:", "- samo", "- pruned", "---", ""),
        *(f"# {plain(name)}", ""),
        f"{count(total - pruned)} of {count(total)} weights are kept: the sparsity of the whole "
        f"model is {percent(pruned / total if total else 0.0)}. Pruned weights are exactly 0.",
        "",
        f"Written by samo {__version__}. {_FORMATS[layout]}",
    ]
    if masks:
        lines += ["", "## Sparsity", "", *_table("kind", _by(masks, _kind_of)), ""]
        lines += _table("layer", _by(masks, _layer_of))
    return "\n".join(lines) + "\n"


def _by(masks: Masks, key: Any) -> dict[str, list[Mask]]:
    found: dict[str, list[Mask]] = {}
    for name, mask in masks.items():
        found.setdefault(key(name), []).append(mask)
    return found


def _kind_of(name: str) -> str:
    """Return the name of a weight without its layer's number: ``self_attn.q_proj.weight``."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[0] + 1 :] if numbers else parts)


def _layer_of(name: str) -> str:
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return numbers[0] if numbers else "others"


def _table(title: str, rows: dict[str, list[Mask]]) -> list[str]:
    lines = [f"| {title} | kept | of | sparsity |", "| --- | --- | --- | --- |"]
    for name, masks in rows.items():
        kept, numel = sum(mask.kept for mask in masks), sum(mask.numel for mask in masks)
        lines.append(
            f"| {plain(name)} | {count(kept)} | {count(numel)} | {percent(1 - kept / numel)} |"
        )
    return lines
