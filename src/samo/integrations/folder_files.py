"""The files of a Hugging Face model folder, which may come from a stranger.

config.json                    the architecture; `quantization_config` says how weights are stored
generation_config.json         how the model generates text
model.safetensors              the weights, or
model.safetensors.index.json   the files that hold them: model-00001-of-00002.safetensors, ...
masks.safetensors              samo's masks, where zeros alone would not tell them exactly

A folder that samo compressed has the state dict of a compressed model: of each pruned weight the
values, 1-D, under its own name, and its bitmap under NAME_bitmap.
"""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import safe_open
from torch import Tensor, nn

from samo.core.modules import BITMAP, from_bytes
from samo.errors import CheckpointError, nearest
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.utils import safetensors_io, untrusted

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MASKS: Final = "masks.safetensors"
QUANTIZATION: Final = "quantization_config"

ADAPTER: Final = "adapter_config.json"

METHOD: Final = "samo"
"""The ``quant_method`` of folders that samo compressed."""
VERSION: Final = 1
"""Of the layout of these folders."""

TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
"""The files of a tokenizer, which are copied from folder to folder as they are."""

FLOATS: Final = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights, as safetensors calls them."""

_TEMPLATES: Final = "additional_chat_templates"
"""The one folder in a model folder that transformers reads."""

_MAX_BYTES: Final = 2**26
"""Largest JSON file read. The index of the largest models has 10 MB."""


class Spec(NamedTuple):
    """Type and shape of a tensor, and the file it is in."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def check_entries(folder: Path) -> None:
    """Refuse links, pipes and devices in a folder: reading one would read something else.

    Links of the hub's cache are fine: they lead to the files of the same repository.
    """
    blobs = folder.resolve().parent.parent / "blobs"
    with os.scandir(folder) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode) and entry.name == _TEMPLATES:
                check_entries(Path(entry.path))
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                continue
            target = Path(os.path.realpath(entry.path))  # resolve() fails on links in a circle
            if entry.is_symlink() and target.parent == blobs and target.is_file():
                continue
            raise CheckpointError(
                f"'{entry.path}' is a link, a pipe or a device, and a model is read from files in "
                "its own folder only; copy it with cp -rL"
            )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    with reading(file):
        # The links that `check_entries` lets through are followed.
        data = untrusted.read_file(file.resolve(), _MAX_BYTES)
        found = untrusted.parse_json(data)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    return found


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings of a folder's config.json; None removes one."""
    config = read_json(folder / CONFIG) | changes
    gone = {name for name, value in changes.items() if value is None}  # others may be null: GPT-2's
    write_json(folder / CONFIG, {name: config[name] for name in config.keys() - gone})


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, of known names only."""
    check_entries(source)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a model, all of which are there."""
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"'{folder}' has an adapter ({ADAPTER}), for which transformers would load the model "
            "that it names from elsewhere; merge it with peft's merge_and_unload, and save the "
            "whole model"
        )
    if parts := sorted(folder.glob("shard-*.safetensors")):
        raise CheckpointError(
            f"'{folder}' has parts of tensors ({parts[0].name}), which transformers would read and "
            f"samo does not; save the whole model to {WEIGHTS}"
        )
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        pickles = [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pt*"))]
        if not pickles:
            raise CheckpointError(
                f"'{folder}' has no weights: neither {WEIGHTS} nor {INDEX} is there"
            )
        raise CheckpointError(
            f"'{folder}' has its weights in '{pickles[0].name}' only, a pickle, which can run code "
            "when it is read; convert it to safetensors in a place you trust: load the model with "
            "transformers there, and call save_pretrained"
        )
    listed = read_json(folder / INDEX).get("weight_map")
    names: list[Any] = [*listed.values()] if isinstance(listed, dict) and listed else [None]
    for name in names:
        is_name = isinstance(name, str) and name == Path(name).name and "\\" not in name
        if not is_name or not str(name).endswith(".safetensors"):
            raise CheckpointError(
                f"'{folder / INDEX}' is damaged: its weight_map names {name!r}, which is not a "
                "safetensors file of the folder; download the model again"
            )
        if not (folder / str(name)).is_file():
            raise CheckpointError(
                f"'{folder}' is not complete: '{name}', which {INDEX} names, is missing; download "
                "it again"
            )
    return [folder / name for name in sorted(set(names))]


def read_specs(files: list[Path]) -> dict[str, Spec]:
    """Return the tensors of safetensors files, by their headers, which safetensors checks."""
    specs: dict[str, Spec] = {}
    for file in files:
        with reading(file), safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                header = tensors.get_slice(name)
                if name in specs:
                    raise ValueError(f"'{name}' is also in '{specs[name].file.name}'")
                specs[name] = Spec(header.get_dtype(), tuple(header.get_shape()), file)
                if max(specs[name].shape, default=0) >= 2**63:  # beside a 0
                    raise ValueError(f"'{name}' has shape {specs[name].shape}")
    return specs


def read_tensor(spec: Spec, name: str) -> Tensor:
    """Return a tensor, in memory of its own."""
    with reading(spec.file), safe_open(spec.file, framework="pt") as tensors:
        found: Tensor = tensors.get_tensor(name)
        return found.clone()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what is wrong with a file into an error that names it."""
    try:
        yield
    except safetensors_io.READ_ERRORS as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(
            f"'{file}' cannot be read: {what}; download the model again"
        ) from error


# Compressed folders


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
        mask = from_bytes(weight, read_tensor(spec, name), own[weight].shape)
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
