"""Write models as Hugging Face folders."""

import copy
import glob
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from samo.core.compress import dense_of, masks as masks_of
from samo.core.modules import BITMAP, CompressedModule, named_weights, original_class, to_bytes
from samo.core.shards import whole
from samo.errors import CheckpointError
from samo.integrations import folder_files, sparse_bitmask
from samo.integrations.checked_loading import hidden_bars
from samo.integrations.folder_files import GENERATION, MASKS, METHOD, QUANTIZATION, VERSION
from samo.integrations.gpt2 import to_gpt2, write_byte_tokenizer
from samo.integrations.model_card import model_card
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.models.gpt import GPT
from samo.utils import atomic_io

Format = Literal["dense", "compressed", "bitmask"]


def export(
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
        >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64))
        >>> _ = samo.compress_(model, samo.prune(model, sparsity=0.9))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     out = samo.export(model, f"{folder}/small", format="compressed")
        ...     again = AutoModelForCausalLM.from_pretrained(out)
        >>> samo.masks(again) == samo.masks(model)
        True

    Args:
        model: A causal language model of transformers, dense or compressed, or a `GPT` of samo,
            which becomes a GPT-2. It stays as it is.
        out: The folder to make, which must not exist.
        format: ``"dense"`` has zeros where weights are pruned, and every tool reads it.
            ``"compressed"`` has values and bitmaps: after ``import samo``, ``from_pretrained``
            makes a compressed model of it. ``"bitmask"`` is the layout sparse-bitmask of
            compressed-tensors 0.14.
        dtype: Dtype of the weights in the files; by default that in which the model computes.
        source: Folder whose tokenizer files are copied. A GPT of 256 tokens gets a tokenizer of
            bytes without one.
        masks: Masks of a dense model; its pruned weights are written as zeros. By default, if the
            format needs some, what is 0 is pruned.
        max_shard_size: Largest size of a file, such as ``"5GB"``.

    Raises:
        CheckpointError: The folder exists, or cannot be written.
        MaskError: The model is not pruned, or the masks do not fit it.
    """
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    if isinstance(model, CompressedModule):
        if masks is not None:
            raise ValueError("masks are for dense models; a compressed model has its own")
        masks = masks_of(model)
    elif masks is None and format != "dense":
        masks = Masks.from_zeros(model)
    elif masks is not None:
        masks.parameters_of(model)  # checks names and shapes
    dtype_of_files = dtype or compute_dtype(model)
    gpt = model.config if isinstance(model, GPT) else None
    if isinstance(model, GPT):
        model, masks, dtype = *to_gpt2(model, masks), dtype_of_files
    if not hasattr(model, "save_pretrained"):
        raise TypeError(f"model must be one of transformers, got {type(model).__name__}")
    with _new_folder(Path(out)) as folder:
        is_compressed = format == "compressed"
        state = state_of(model, masks, dtype, is_compressed=is_compressed)
        _save(model, folder, state, max_shard_size, is_original=not is_compressed)
        del state
        changes: dict[str, Any] = {"dtype": str(dtype_of_files).removeprefix("torch.")}
        if is_compressed:
            changes[QUANTIZATION] = {"quant_method": METHOD, "version": VERSION}
        folder_files.edit_config(folder, **changes)
        if format == "bitmask":
            sparse_bitmask.write(folder)
        if masks is not None and not is_compressed:
            masks.save(folder / MASKS)
        if source is not None:
            folder_files.copy_tokenizer(Path(source), folder)
        elif gpt is not None and gpt.vocab_size == 256:
            write_byte_tokenizer(folder, gpt.context)
        (folder / "README.md").write_text(model_card(model, masks, Path(out).name, format), "utf-8")
        for file in folder.glob("*.safetensors"):
            shutil.copymode(
                folder / folder_files.CONFIG, file
            )  # safetensors 0.8 makes them private
    return Path(out)


def _save(
    model: Any, folder: Path, state: dict[str, Tensor], max_shard_size: Any, *, is_original: bool
) -> None:
    """Let transformers write a state dict with its config; the model's own stays as it is."""
    config, model.config = model.config, copy.deepcopy(model.config)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        model.generation_config = type(generation)()
    try:
        save: Any = original_class(model).save_pretrained  # type: ignore[attr-defined]
        with hidden_bars():
            save(  # not the one of a compressed model
                model,
                folder,
                state_dict=state,
                max_shard_size=max_shard_size,
                save_original_format=is_original,
            )
    finally:
        model.config = config
        if generation is not None:
            model.generation_config = generation
    if generation is not None:
        # transformers would refuse to write what it did read, such as a temperature for no sampling
        (folder / GENERATION).write_text(generation.to_json_string(), "utf-8")


@torch.no_grad()
def state_of(
    model: nn.Module, masks: Masks | None, dtype: torch.dtype | None, *, is_compressed: bool
) -> dict[str, Tensor]:
    """Return a state dict for a file, of a model that may be compressed itself; tied is one tensor.

    Weights are in ``dtype``, or in that in which each computes.
    """
    state = model.state_dict(keep_vars=True)
    weights = dict(named_weights(model, remove_duplicate=False))
    pruned = {} if weights else {id(state[name]): mask for name, mask in (masks or {}).items()}
    made: dict[int, Tensor] = {}

    def make(name: str, value: Tensor) -> Tensor:
        if (weight := weights.get(name)) is not None:
            to = dtype or weight.dtype
            return whole(value.detach()).to(to) if is_compressed else dense_of(weight, to)
        is_cast = dtype is not None and isinstance(value, nn.Parameter)
        found = value.detach().to(dtype if is_cast and value.is_floating_point() else value.dtype)
        if id(value) not in pruned:
            return found
        mask = pruned[id(value)].to(value.device)
        if is_compressed:
            return found[mask.to_bool()]
        # A large model may be in mapped files, with its zeros, so that it need not fit in memory.
        return found if mask.is_zeroed(found) else mask.zero_(found.clone())

    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.removesuffix(BITMAP) in weights and name not in weights:
            if is_compressed:
                found[name] = value
            continue
        if id(value) not in made:
            made[id(value)] = make(name, value)
        found[name] = made[id(value)]
        if is_compressed and id(value) in pruned:
            found[name + BITMAP] = to_bytes(pruned[id(value)])
    return found


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which most weights of a model compute."""
    counts: Counter[torch.dtype] = Counter()
    for param in {id(param): param for param in dense_parameters(model).values()}.values():
        if param.is_floating_point():
            counts[param.dtype] += param.numel()
    return counts.most_common(1)[0][0]


def check_free(path: Path) -> None:
    """Refuse a folder that exists."""
    if os.path.lexists(path):
        raise CheckpointError(f"'{path}' exists; choose another folder, or remove it")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, which gets that name if the body succeeds."""
    check_free(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        atomic_io.make_folders(path.parent)
        _remove_drafts(path)
        draft.mkdir()
        try:
            with atomic_io.locked(draft):
                yield draft
                for file in draft.iterdir():
                    with open(file, "rb") as stream:
                        os.fsync(stream.fileno())
                atomic_io.sync_folder(draft)
                check_free(path)  # another process may have written it meanwhile
                os.rename(draft, path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        atomic_io.sync_folder(path.parent)
    except SafetensorError as error:  # transformers writes with it: a full disk
        raise CheckpointError(
            f"cannot write '{path}': {error}; free some space, or choose another folder"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write '{path}': '{error.filename or path}': {error.strerror or error}; free "
            "some space, or choose another folder"
        ) from error


def _remove_drafts(path: Path) -> None:
    """Remove what processes that were killed have left: drafts that nobody has locked."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}"):
        with suppress(OSError), atomic_io.locked(draft):
            shutil.rmtree(draft, ignore_errors=True)
