"""What a Hugging Face folder holds, counted tensor by tensor: no model is built."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from samo.core.modules import BITMAP
from samo.errors import CheckpointError
from samo.integrations import folder_files, hugging_face, sparse_bitmask
from samo.integrations.folder_files import CONFIG, MASKS, METHOD, Spec
from samo.mask.masks import MIN_SPARSITY, Masks
from samo.memory.predict import TensorSpec, total
from samo.utils.safetensors_io import DTYPES

__all__ = ["FolderFacts", "TensorFacts", "inspect_folder"]

_EMBEDDING: Final = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe)[._]")
_FLOATS: Final = [str(DTYPES[name]).removeprefix("torch.") for name in folder_files.FLOATS]


class TensorFacts(NamedTuple):
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kept: int | None
    """None if it is not pruned."""
    num_bytes: int
    """On the disk, with its mask."""

    @property
    def numel(self) -> int:
        """Weights of the dense tensor."""
        return torch.Size(self.shape).numel()

    @property
    def sparsity(self) -> float:
        """Fraction pruned."""
        return 0.0 if self.kept is None else 1 - self.kept / max(self.numel, 1)


class FolderFacts(NamedTuple):
    """What a folder holds."""

    kind: str
    """dense, compressed, sparse-bitmask, or quantized by another method."""
    model_type: str
    dtype: str
    """In which the model computes."""
    masks: str
    """Where the masks are from: masks.safetensors, bitmaps, or zeros; "" without pruned weights."""
    num_bytes: int
    """Of the files with weights and masks."""
    tensors: tuple[TensorFacts, ...]

    @property
    def pruned(self) -> tuple[TensorFacts, ...]:
        """The tensors with masks."""
        return tuple(tensor for tensor in self.tensors if tensor.kept is not None)

    def run_bytes(self) -> dict[str, int]:
        """Return the bytes of the weights to run the model, by how they are held."""
        size = getattr(torch, self.dtype).itemsize
        found = {"dense": sum(size * tensor.numel for tensor in self.tensors)}
        for weights in ("resident", "streamed") if self.pruned else ():
            specs = self._specs(self.dtype, weights, is_trained=False)
            found[weights] = sum(total(specs).values())
        return found

    def train_bytes(self) -> dict[str, int]:
        """Return the bytes of model state to train in bfloat16 with samo.AdamW, by how."""
        specs = self._specs("bfloat16", "resident")
        found = {"dense": sum(total(specs, "dense").values())}
        for state in ("exact", "lean") if self.pruned else ():
            values = "bfloat16" if state == "lean" else "float32"
            for weights in ("resident", "streamed"):
                options = {"value_dtype": values, "is_lean": state == "lean"}
                specs = self._specs("bfloat16", weights, **options)
                found[f"{state}_{weights}"] = sum(total(specs).values())
        return found

    def _specs(self, dtype: str, weights: str, **others: Any) -> list[TensorSpec]:
        # Gradients of matrices have 16 bits, as in samo train; those of norms and biases are like
        # their values.
        return [
            TensorSpec(
                numel=tensor.numel,
                kept=tensor.kept,
                dtype=dtype,
                grad_dtype=dtype if len(tensor.shape) > 1 else "",
                is_resident=weights == "resident" or tensor.kept is None,
                **others,
            )
            for tensor in self.tensors
        ]


def inspect_folder(path: str | os.PathLike[str]) -> FolderFacts:
    """Count the weights of a Hugging Face folder, and those that are pruned.

    Example:
        >>> import tempfile, samo
        >>> from samo.integrations.inspection import inspect_folder
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
        >>> samo.prune(model, sparsity=0.75).apply_(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     facts = inspect_folder(folder)
        >>> facts.kind, facts.masks, len(facts.pruned), facts.pruned[0].sparsity
        ('dense', 'zeros', 4, 0.75)

    Raises:
        CheckpointError: The folder cannot be read.
        MaskError: Its masks are damaged.
    """
    folder = Path(path)
    folder_files.check_entries(folder)
    config = folder_files.read_json(folder / CONFIG)
    files = folder_files.weight_files(folder)
    specs = folder_files.read_specs(files)
    method = hugging_face.method_of(folder)
    if method == METHOD:
        kind, masks, tensors = "compressed", "bitmaps", _compressed(folder, specs)
    elif any(name.endswith(".bitmask") for name in specs):
        kind, masks, tensors = sparse_bitmask.FORMAT, "bitmaps", list(_bitmask(specs))
    else:
        kind = "dense" if method is None else f"quantized ({method})"
        masks, tensors = _dense(folder, specs)
    if (folder / MASKS).is_file():
        files = [*files, folder / MASKS]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if dtype not in _FLOATS:
        dtype = _main_dtype(tensors)
    return FolderFacts(
        kind=kind,
        model_type=str(config.get("model_type", "")),
        dtype=dtype,
        masks=masks if any(tensor.kept is not None for tensor in tensors) else "",
        num_bytes=sum(file.stat().st_size for file in files),
        tensors=tuple(tensors),
    )


def _dense(folder: Path, specs: dict[str, Spec]) -> tuple[str, list[TensorFacts]]:
    """Take the masks of masks.safetensors, or count zeros where the file names other tensors."""
    exact = Masks.load(folder / MASKS) if (folder / MASKS).is_file() else None
    if exact is not None and all(
        name in specs and specs[name].shape == mask.shape for name, mask in exact.items()
    ):
        kept: dict[str, int | None] = {name: mask.kept for name, mask in exact.items()}
        return MASKS, [_facts(name, spec, kept.get(name)) for name, spec in specs.items()]
    found = []
    for name, spec in specs.items():
        is_matrix = len(spec.shape) >= 2 and _type(spec) in _FLOATS and not _EMBEDDING.search(name)
        nonzero = int(folder_files.read_tensor(spec, name).count_nonzero()) if is_matrix else None
        facts = _facts(name, spec, nonzero)
        is_pruned = nonzero != 0 and facts.sparsity >= MIN_SPARSITY
        found.append(facts if is_pruned else facts._replace(kept=None))
    return "zeros", found


def _compressed(folder: Path, specs: dict[str, Spec]) -> list[TensorFacts]:
    """Take the counts of kept values; the dense shapes follow from the config."""
    model = hugging_face.empty_model(folder, len(specs))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    found = []
    for name, spec in specs.items():
        bitmap = specs.get(name + BITMAP)
        if name.endswith(BITMAP) and name.removesuffix(BITMAP) in specs:
            continue
        if bitmap is None:
            found.append(_facts(name, spec, None))
            continue
        if name not in shapes:
            raise CheckpointError(f"'{folder}' is damaged: its model has no weight '{name}'")
        own = _facts(name, spec, spec.shape[0] if spec.shape else 0)
        size = own.num_bytes + torch.Size(bitmap.shape).numel()
        found.append(own._replace(shape=shapes[name], num_bytes=size))
    return found


def _bitmask(specs: dict[str, Spec]) -> Iterator[TensorFacts]:
    """Yield the tensors of the layout of compressed-tensors, in which a weight has four parts."""
    modules = {name.removesuffix(".bitmask") for name in specs if name.endswith(".bitmask")}
    parts = {f"{module}.{part}" for module in modules for part in sparse_bitmask.PARTS}
    for name, spec in specs.items():
        if name not in parts:
            yield _facts(name, spec, None)
        elif name.endswith(".bitmask"):
            module = name.removesuffix(".bitmask")
            weight = sparse_bitmask.read_weight(module, specs)
            own = (f"{module}.{part}" for part in sparse_bitmask.PARTS)
            size = sum(_size(specs[part]) for part in own if part in specs)
            kept, dtype = int(weight.count_nonzero()), str(weight.dtype).removeprefix("torch.")
            yield TensorFacts(f"{module}.weight", tuple(weight.shape), dtype, kept, size)


def _facts(name: str, spec: Spec, kept: int | None) -> TensorFacts:
    return TensorFacts(name, spec.shape, _type(spec), kept, _size(spec))


def _type(spec: Spec) -> str:
    return str(DTYPES.get(spec.dtype, spec.dtype)).removeprefix("torch.")


def _size(spec: Spec) -> int:
    dtype = DTYPES.get(spec.dtype)
    return torch.Size(spec.shape).numel() * (1 if dtype is None else dtype.itemsize)


def _main_dtype(tensors: list[TensorFacts]) -> str:
    sizes = {dtype: sum(t.numel for t in tensors if t.dtype == dtype) for dtype in _FLOATS}
    return max(sizes, key=lambda dtype: sizes[dtype])
