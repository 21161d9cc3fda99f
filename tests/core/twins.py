"""A compressed model beside its masked dense twin: the same weights, batches and optimizer."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samo
from samo.core.compress import masks as masks_of
from samo.core.modules import named_weights

X = torch.linspace(-1, 1, 36).view(3, 12)
"""An input of `mlp`."""

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({"dtype": torch.float32}, {}),
    "bf16": ({"dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}, {}),
    "bf16 values": ({"dtype": torch.bfloat16, "value_dtype": torch.bfloat16}, {}),
    "fp16": ({"dtype": torch.float16}, {}),
    "ages": ({"dtype": torch.bfloat16}, {"entry_steps": True}),
    "lean fp32": ({"dtype": torch.float32}, {"state": "lean"}),
    "lean": ({"dtype": torch.bfloat16, "value_dtype": torch.bfloat16}, {"state": "lean"}),
}
"""How a model is compressed, and what its samo.AdamW keeps."""

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

WAYS: dict[str, tuple[dict[str, Any], Make]] = {
    "sgd": ({"dtype": torch.bfloat16}, partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    "adam": ({"dtype": torch.float32}, partial(torch.optim.Adam, lr=0.01, amsgrad=True)),
    **{
        kind: (options, partial(samo.AdamW, lr=0.01, **settings))
        for kind, (options, settings) in KINDS.items()
    },
}
"""How a model is compressed, and its optimizer."""


def mlp(width: int = 32) -> nn.Sequential:
    """The smallest model in which a wrong gradient spreads."""
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 6))


def hugging_face(family: str, **changes: Any) -> Any:
    """A small language model of transformers."""
    pytest.importorskip("transformers")
    from tests.integrations.tiny_lms import tiny_lm

    return tiny_lm(family, **changes)


def compressed(
    dtype: torch.dtype | None = None, *, sparsity: float = 0.5, **options: Any
) -> nn.Sequential:
    """`mlp`, compressed."""
    model = mlp()
    samo.compress_(model, samo.prune(model, sparsity), dtype=dtype, **options)
    return model


def random_masks(model: nn.Module, density: float = 0.5, seed: int = 0) -> samo.Masks:
    """Return masks of all parameters with two dimensions or more; each keeps its first entry."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    shapes.update({name: weight.shape for name, weight in named_weights(model)})
    found = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            keep = torch.rand(shape, generator=generator) < density
            keep.view(-1)[0] = True
            found[name] = samo.Mask.from_bool(keep)
    return samo.Masks(found)


def masked_twin(model: nn.Module, masks: samo.Masks) -> nn.Module:
    """Return a dense copy that stays masked whatever trains it: pruned weights and gradients are 0.

    The hook sees a parameter's whole gradient of a backward pass, before it is added to ``.grad``.
    """
    twin = copy.deepcopy(model)
    mask_(twin, masks)
    return twin


def mask_(model: nn.Module, masks: samo.Masks) -> None:
    """Mask the weights of a dense model now, and their gradients from now on."""
    masks.apply_(model)
    seen = set()
    for name, param in masks.parameters_of(model).items():
        if param.requires_grad and id(param) not in seen:
            keep = masks[name].to_bool()
            seen.add(id(param))
            param.register_hook(lambda grad, keep=keep: grad.where(keep, 0))


def twins(
    model: nn.Module, masks: samo.Masks | None = None, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Compress a model in place; return it and its masked dense twin."""
    masks = samo.prune(model, 0.9) if masks is None else masks
    dense = masked_twin(model, masks)
    return samo.compress_(model, masks, **options), dense


class Cast(nn.Module):
    """The masked dense run of mixed precision: weights that are cast before every pass."""

    def __init__(self, master: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.master, self.dtype = master, dtype

    def forward(self, x: Tensor) -> Tensor:
        cast = {name: param.to(self.dtype) for name, param in self.master.named_parameters()}
        return torch.func.functional_call(self.master, cast, (x,))


def batches(steps: int, *, dtype: torch.dtype = torch.float32, seed: int = 1) -> Iterator[Tensor]:
    """Inputs of `mlp`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(8, 12, generator=generator).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A loss in fp32 or wider, whatever the model computes in, with something to learn."""
    out = model(x)
    out = out if out.dtype == torch.float64 else out.float()
    return (out - x[:, : out.shape[1]].to(out.dtype).sin()).square().mean()


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> float:
    """Train on one batch."""
    opt.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    opt.step()
    return float(loss.detach())


def worst(model: nn.Module, dense: nn.Module) -> float:
    """Return the largest difference of any weight; NaN if there is one."""
    ours, theirs = samo.dense_state_dict(model), dense.state_dict()
    assert list(ours) == list(theirs)
    found = [(ours[n].double() - theirs[n].double()).abs().max() for n in theirs if ours[n].numel()]
    return float(torch.stack(found).max())


def assert_equal(model: nn.Module, dense: nn.Module) -> None:
    """Compare every weight bit for bit."""
    ours, theirs = samo.dense_state_dict(model), dense.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def pruned_entries(model: nn.Module) -> Tensor:
    """Return all entries of the dense weights that are pruned; they are to be 0."""
    masks, state = masks_of(model), samo.dense_state_dict(model)
    return torch.cat([state[name][~mask.to_bool()] for name, mask in masks.items()])
