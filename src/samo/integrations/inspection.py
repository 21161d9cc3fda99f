"""What a Hugging Face folder holds, counted tensor by tensor: no model is built."""

import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from samo.core.modules import BITMAP
from samo.errors import CheckpointError
from samo.integrations import checked_loading, folder_files, sparse_bitmask
from samo.integrations.folder_files import CONFIG, MASKS, METHOD, Spec
from samo.mask.masks import MIN_SPARSITY, Masks
from samo.memory.predict import Scheme, TensorSpec, predict
from samo.utils.safetensors_io import DTYPES

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
        """Return the bytes of the weights to run the model: dense, and streamed if it is pruned."""
        found = {"dense": sum(getattr(torch, self.dtype).itemsize * t.numel for t in self.tensors)}
        if self.pruned:
            found["streamed"] = self._bytes(self.dtype, is_trained=False)
        return found

    def train_bytes(self) -> dict[str, int]:
        """Return the bytes of model state to train in bfloat16: dense, and streamed with samo."""
        found = {"dense": self._bytes("bfloat16", "dense")}
        if self.pruned:
            found["streamed, exact"] = self._bytes("bfloat16")
            found["streamed, lean"] = self._bytes("bfloat16", value_dtype="bfloat16", is_lean=True)
        return found

    def _bytes(self, dtype: str, scheme: Scheme = "samo", **others: Any) -> int:
        """Return what `samo.ledger` would count. Gradients of matrices have 16 bits."""
        specs = [
            TensorSpec(
                numel=tensor.numel,
                kept=tensor.kept,
                dtype=dtype,
                grad_dtype=dtype if len(tensor.shape) > 1 else "",
                is_resident=tensor.kept is None,
                **others,
            )
            for tensor in self.tensors
        ]
        return sum(sum(predict(spec, scheme).values()) for spec in specs)


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
    method = checked_loading.quantization_of(folder).get("quant_method")
    if method == METHOD:
        kind, masks, tensors = "compressed", "bitmaps", _compressed(folder, specs)
    elif any(name.endswith(".bitmask") for name in specs):
        kind, masks, tensors = sparse_bitmask.FORMAT, "bitmaps", _bitmask(specs)
    else:
        kind = "dense" if method is None else f"quantized ({method})"
        masks, tensors = _dense(folder, specs)
    if (folder / MASKS).is_file():
        files = [*files, folder / MASKS]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if dtype not in _FLOATS:
        sizes = {name: sum(t.numel for t in tensors if t.dtype == name) for name in _FLOATS}
        dtype = max(sizes, key=lambda name: sizes[name])
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
    exact = Masks.load(folder / MASKS) if (folder / MASKS).is_file() else Masks({})
    if exact and all(n in specs and specs[n].shape == mask.shape for n, mask in exact.items()):
        kept = {name: mask.kept for name, mask in exact.items()}
        return MASKS, [_facts(name, spec, kept.get(name)) for name, spec in specs.items()]
    found = []
    for name, spec in specs.items():
        facts = _facts(name, spec, None)
        if len(spec.shape) >= 2 and facts.dtype in _FLOATS and not _EMBEDDING.search(name):
            nonzero = int(folder_files.read_tensor(spec, name).count_nonzero())
            if nonzero and 1 - nonzero / facts.numel >= MIN_SPARSITY:
                facts = facts._replace(kept=nonzero)
        found.append(facts)
    return "zeros", found


def _compressed(folder: Path, specs: dict[str, Spec]) -> list[TensorFacts]:
    """Take the counts of kept values; the dense shapes follow from the config."""
    model = checked_loading.empty_model(folder, len(specs))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    found = []
    for name, spec in specs.items():
        if name.endswith(BITMAP) and name.removesuffix(BITMAP) in specs:
            continue
        facts = _facts(name, spec, None)
        if (bitmap := specs.get(name + BITMAP)) is not None:
            if name not in shapes:
                raise CheckpointError(f"'{folder}' is damaged: its model has no weight '{name}'")
            kept, num_bytes = facts.numel, facts.num_bytes + torch.Size(bitmap.shape).numel()
            facts = facts._replace(shape=shapes[name], kept=kept, num_bytes=num_bytes)
        found.append(facts)
    return found


def _bitmask(specs: dict[str, Spec]) -> list[TensorFacts]:
    """Count the bits of the layout of compressed-tensors, in which a weight has four parts."""
    modules = sparse_bitmask.parts_of(specs)
    parts = {part for own in modules.values() for part in own}
    found = [_facts(name, spec, None) for name, spec in specs.items() if name not in parts]
    for module, own in modules.items():
        weight = sparse_bitmask.read_weight(module, specs)
        kept, dtype = int(weight.count_nonzero()), str(weight.dtype).removeprefix("torch.")
        num_bytes = sum(_facts(part, specs[part], None).num_bytes for part in own)
        found.append(TensorFacts(f"{module}.weight", (*weight.shape,), dtype, kept, num_bytes))
    return found


def _facts(name: str, spec: Spec, kept: int | None) -> TensorFacts:
    dtype = DTYPES.get(spec.dtype)
    size = torch.Size(spec.shape).numel() * (1 if dtype is None else dtype.itemsize)
    shown = str(dtype or spec.dtype).removeprefix("torch.")
    return TensorFacts(name, spec.shape, shown, kept, size)
