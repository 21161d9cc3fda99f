"""The README.md of an exported model: what is pruned, how much, and by what."""

import re
from typing import Final

from torch import nn

from samo import __version__
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.utils.formatting import count, percent, plain

_LAYER_NUMBER: Final = re.compile(r"\.(\d+)\.")
_WITHIN_LAYER: Final = re.compile(r"\.\d+\.(.*)")
_FORMATS: Final = {
    "dense": "The weights are dense. `masks.safetensors`, if present, holds the masks: a kept "
    "weight may be exactly 0.",
    "compressed": "The weights are compressed: values and bitmaps. `import samo` before "
    "`from_pretrained`, or transformers reports mismatched sizes. It can be trained as it is.",
    "bitmask": "The weights are in the layout `sparse-bitmask` of compressed-tensors, which its "
    "versions up to 0.14, transformers up to 4.55 with these, and samo read; `samo export DIR "
    "--format dense` converts it. It loses kept weights that are exactly 0; `masks.safetensors` "
    "has the masks.",
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
    for title, pattern in (("layer", _LAYER_NUMBER), ("weights", _WITHIN_LAYER)):
        groups: dict[str, list[Mask]] = {}
        for key, mask in (masks or {}).items():
            found = pattern.search(key)
            groups.setdefault(found[1] if found else key, []).append(mask)
        if groups:
            lines += ["", f"| {title} | kept | of | sparsity |", "| --- | --- | --- | --- |"]
        for group, own in groups.items():
            kept, numel = sum(mask.kept for mask in own), sum(mask.numel for mask in own)
            sparsity = percent(1 - kept / numel)
            lines.append(f"| {plain(group)} | {count(kept)} | {count(numel)} | {sparsity} |")
    return "\n".join(lines) + "\n"
