"""The README.md of an exported model: what is pruned, how much, and by what."""

import re
from typing import Final

from torch import nn

from samo import __version__
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.utils.formatting import count, percent, plain

__all__ = []

_LAYER: Final = re.compile(r"^.*?\.\d+\.")
_FORMATS: Final = {
    "dense": "The weights are dense. `masks.safetensors`, if there, has the masks: a kept weight "
    "may be exactly 0.",
    "compressed": "The weights are compressed: values and bitmaps. `import samo` before "
    "`from_pretrained`; the model can be trained on as it is.",
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
        lines += ["", "| weights | kept | of | sparsity |", "| --- | --- | --- | --- |"]
        kinds: dict[str, list[Mask]] = {}  # self_attn.q_proj.weight of all layers
        for key, mask in masks.items():
            kinds.setdefault(_LAYER.sub("", key, count=1), []).append(mask)
        for kind, group in kinds.items():
            kept, numel = sum(mask.kept for mask in group), sum(mask.numel for mask in group)
            sparsity = percent(1 - kept / numel)
            lines.append(f"| {plain(kind)} | {count(kept)} | {count(numel)} | {sparsity} |")
    return "\n".join(lines) + "\n"
