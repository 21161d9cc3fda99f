"""Write models as Hugging Face folders."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from samo.core.compress import dense_state_dict, masks as masks_of
from samo.core.modules import CompressedModule
from samo.errors import CheckpointError
from samo.integrations import folder_files
from samo.integrations.folder_files import CONFIG, MASKS
from samo.integrations.model_card import model_card
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.utils import atomic_io

__all__ = ["Format", "write_folder"]

Format = Literal["dense"]


def write_folder(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    format: Format = "dense",
    dtype: torch.dtype | None = None,
    source: str | os.PathLike[str] | None = None,
    masks: Masks | None = None,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write a Hugging Face model as a folder that `from_pretrained` reads; return the folder.

    The folder appears complete or not at all. With masks, ``masks.safetensors`` records them: a
    kept weight may be exactly 0.

    Example:
        >>> import tempfile, samo
        >>> from samo.integrations.export import write_folder
        >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64))
        >>> masks = samo.prune(model, sparsity=0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     out = write_folder(model, f"{folder}/pruned", masks=masks)
        ...     again = AutoModelForCausalLM.from_pretrained(out)
        >>> samo.Masks.from_zeros(again) == masks
        True

    Args:
        model: A causal language model of transformers, dense or compressed; it stays as it is.
        out: The folder to make, which must not exist.
        format: ``"dense"`` has zeros where weights are pruned, and every tool reads it.
        dtype: Dtype of the weights in the files; by default that in which the model computes.
        source: Folder whose tokenizer files are copied.
        masks: Masks of a dense model; its pruned weights are written as zeros.
        max_shard_size: Largest size of a file, such as ``"5GB"``.

    Raises:
        CheckpointError: The folder exists, or cannot be written.
    """
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    if not hasattr(model, "save_pretrained"):
        raise TypeError(f"model must be one of transformers, got {type(model).__name__}")
    if isinstance(model, CompressedModule):
        if masks is not None:
            raise ValueError("masks are for dense models; a compressed model has its own")
        masks = masks_of(model)
    with _new_folder(Path(out)) as folder:
        _write_dense(model, folder, dtype, masks, max_shard_size)
        if masks is not None:
            masks.save(folder / MASKS)
        if source is not None:
            copy_tokenizer(Path(source), folder)
        (folder / "README.md").write_text(model_card(model, masks, Path(out).name), "utf-8")
    return Path(out)


def _write_dense(
    model: Any, folder: Path, dtype: torch.dtype | None, masks: Masks | None, max_shard_size: Any
) -> None:
    state = dense_state(model, masks, dtype)
    own = model.config.dtype
    model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
    model.config.dtype = own  # transformers writes the dtype of the parameters there
    edit_config(folder, dtype=str(dtype or compute_dtype(model)).removeprefix("torch."))


@torch.no_grad()
def dense_state(
    model: nn.Module, masks: Masks | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the state dict of a model with zeros where weights are pruned."""
    if isinstance(model, CompressedModule):
        own = {name: param.dtype for name, param in dense_parameters(model).items()}
        state = dense_state_dict(model)
    else:
        own = {}
        state = model.state_dict(keep_vars=True)
    pruned = {id(state[name]): mask for name, mask in (masks or {}).items()}
    is_dense = not isinstance(model, CompressedModule)
    made: dict[int, Tensor] = {}
    for name, value in state.items():
        if id(value) not in made:
            is_param = name in own or isinstance(value, nn.Parameter)
            to = (dtype or own.get(name)) if is_param and value.is_floating_point() else None
            found = value.detach().to(to or value.dtype)
            if is_dense and id(value) in pruned:
                mask = pruned[id(value)].to(found.device)
                found = mask.zero_(found.clone() if found.data_ptr() == value.data_ptr() else found)
            made[id(value)] = found
        state[name] = made[id(value)]
    return state


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which most weights of a model compute."""
    counts: dict[torch.dtype, int] = {}
    for param in {id(param): param for param in dense_parameters(model).values()}.values():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype])


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings of a folder's config.json."""
    config = folder_files.read_json(folder / CONFIG) | changes
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, of known names only."""
    folder_files.check_entries(source)
    for name in folder_files.TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, which gets that name if the body succeeds."""
    if os.path.lexists(path):
        raise CheckpointError(f"'{path}' exists; choose another folder, or remove it")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        atomic_io.make_folders(path.parent)
        draft.mkdir()
        try:
            yield draft
            for file in draft.iterdir():
                with open(file, "rb") as stream:
                    os.fsync(stream.fileno())
            atomic_io.sync_folder(draft)
            os.rename(draft, path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        atomic_io.sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write '{path}': '{error.filename or path}': {error.strerror or error}; free "
            "some space, or choose another folder"
        ) from error
