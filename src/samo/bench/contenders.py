"""The ways to train a pruned GPT that ``samo bench step`` compares.

dense                 bfloat16 model, fp32 master and fp32 gradient, fused AdamW; not pruned
masked                the same on the pruned weights
autocast              fp32 model under autocast, fused AdamW; not pruned
samo                  kept values as parameters, samo's AdamW, bfloat16 gradients
samo-torch            kept values as parameters, torch's fused AdamW, fp32 gradients
lean                  bfloat16 kept values, 8-bit state
streamed              as samo, with no dense weight held: each is expanded when it is used
streamed-lean         as lean, likewise
budget-50%            as samo, with half of the dense weights resident and the others streamed
budget-50%-lean       as lean, likewise
flashoptim            FlashOptim's AdamW: 24-bit weights, 8-bit moments
flashoptim-release    the same, each weight updated in backward and its gradient freed
torchao               its AdamW8bit on bfloat16 weights, with stochastic rounding
bitsandbytes          its AdamW8bit on bfloat16 weights

All but samo hold gradients and state for every weight. Those that train a pruned model keep their masks
by setting pruned weights back to 0 after each step, outside of the time that is measured.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from samo import kernels
from samo.core.compress import compress_
from samo.core.optim import AdamW
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.memory.ledger import Ledger, ledger

__all__ = []

SETTINGS: Final[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


class UnavailableError(Exception):
    """A contender that cannot take part here; its message stands in the row."""


class Contender:
    """A model and its optimizer.

    Args:
        model: A bfloat16 model with its first weights.
        masks: What is pruned, on the model's device.
    """

    is_pruned = True

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.optimizer: Any = None
        self.masks: dict[str, Mask] = {}
        if self.is_pruned:
            self._keep(masks)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward, and return the loss."""
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Step the optimizer and let go of the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def keep_masks(self) -> None:
        """Set pruned weights back to 0; not timed."""
        found = dict(self.model.named_parameters())
        for name, mask in self.masks.items():
            zero_(found[name], mask)

    def state_bytes(self) -> int:
        """Measure the bytes held between backward and update: weights, gradients, optimizer, masks."""
        bits = [t for mask in self.masks.values() for t in (mask.words, mask.offsets)]
        return held_bytes([self.model], [self.optimizer], bits)

    def account(self) -> Ledger | None:
        """Return the ledger, if there is one."""
        return None

    def _keep(self, masks: Masks) -> None:
        self.masks = dict(masks)
        self.keep_masks()


class Dense(Contender):
    """A bfloat16 model with an fp32 master and an fp32 copy of the gradient."""

    is_pruned = False

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        super().__init__(model, masks)
        self._params: list[Tensor] = list(model.parameters())
        self._masters: list[Tensor] = [
            nn.Parameter(param.detach().float()) for param in self._params
        ]
        self._wide = [torch.zeros_like(master) for master in self._masters]
        for master, wide in zip(self._masters, self._wide):
            master.grad = wide
        self.optimizer = torch.optim.AdamW(self._masters, fused=True, **SETTINGS)

    def update(self) -> None:
        """Widen the gradients, step, and round the weights."""
        narrow = [param.grad for param in self._params if param.grad is not None]
        torch._foreach_copy_(self._wide, narrow)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._masters)
        for param in self._params:
            param.grad = None

    def state_bytes(self) -> int:
        """Measure the bytes held, those of the masters too."""
        bits = [t for mask in self.masks.values() for t in (mask.words, mask.offsets)]
        return held_bytes([self.model], [self.optimizer], [*self._masters, *self._wide, *bits])


class Masked(Dense):
    """The same on the pruned weights, which a GPU computes faster with."""

    is_pruned = True

    def keep_masks(self) -> None:
        """Set pruned weights and their masters back to 0."""
        super().keep_masks()
        names = [name for name, _ in self.model.named_parameters()]
        for name, master in zip(names, getattr(self, "_masters", ())):
            if name in self.masks:
                zero_(master, self.masks[name])


class Autocast(Contender):
    """A float32 model that computes in bfloat16."""

    is_pruned = False

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        super().__init__(model.float(), masks)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward under autocast, and backward."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss: Tensor = self.model(tokens, targets)
        loss.backward()
        return loss.detach()


class Samo(Contender):
    """Kept values as parameters, with samo's AdamW.

    Args:
        model: A bfloat16 model with its first weights.
        masks: What is pruned, on the model's device.
        weights: Whether dense weights are held; a number is the fraction of their bytes that is.
    """

    types: dict[str, Any] = {"grad_dtype": torch.bfloat16}  # noqa: RUF012

    def __init__(
        self,
        model: nn.Module,
        masks: Masks,
        weights: Literal["resident", "streamed"] | float = "resident",
    ) -> None:
        self._weights = weights
        super().__init__(model, masks)
        self.optimizer = self._optimizer()

    def state_bytes(self) -> int:
        """Take the bytes from the ledger, which measures them."""
        account = self.account()
        return account.measured_bytes + account.other_bytes

    def account(self) -> Ledger:
        """Return the ledger."""
        return ledger(self.model, self.optimizer)

    def keep_masks(self) -> None:
        """Do nothing: pruned weights stay 0."""

    def _optimizer(self) -> torch.optim.Optimizer:
        return AdamW(self.model.parameters(), **SETTINGS)

    def _keep(self, masks: Masks) -> None:
        weights: Any = self._weights
        if not isinstance(weights, str):
            # Unpruned parameters have a dense weight where their values are wider than what is computed in.
            values = self.types.get("value_dtype", torch.float32)
            weights *= sum(
                param.nbytes
                for name, param in self.model.named_parameters()
                if name in masks or param.dtype != values
            )
            weights = int(weights)
        compress_(self.model, masks, weights=weights, **self.types)


class SamoTorch(Samo):
    """Kept values as parameters, with torch's AdamW."""

    types = {}  # noqa: RUF012

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), fused=True, **SETTINGS)


class Lean(Samo):
    """bfloat16 values and state of 8 bits."""

    types = {"grad_dtype": torch.bfloat16, "value_dtype": torch.bfloat16}  # noqa: RUF012

    def _optimizer(self) -> torch.optim.Optimizer:
        return AdamW(self.model.parameters(), state="lean", **SETTINGS)


class FlashOptim(Contender):
    """FlashOptim, which stores weights in 24 bits and moments in 8."""

    releases = False

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        library = peer("flashoptim")
        if next(model.parameters()).device.type != "cuda":
            raise UnavailableError("FlashOptim needs an NVIDIA GPU")
        super().__init__(model, masks)
        self.optimizer = library.FlashAdamW(model.parameters(), **SETTINGS)
        if self.releases:
            self._release = library.enable_gradient_release(model, self.optimizer)

    def update(self) -> None:
        """Step, unless backward has done so already."""
        if not self.releases:
            super().update()


class FlashOptimRelease(FlashOptim):
    """The same, with each weight updated in backward."""

    releases = True


class Torchao(Contender):
    """torchao's 8-bit AdamW."""

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        library = peer("torchao.optim")
        super().__init__(model, masks)
        self.optimizer = library.AdamW8bit(
            model.parameters(), bf16_stochastic_round=True, **SETTINGS
        )


class Bitsandbytes(Contender):
    """The 8-bit AdamW of bitsandbytes."""

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        library = peer("bitsandbytes.optim")
        super().__init__(model, masks)
        self.optimizer = library.AdamW8bit(model.parameters(), **SETTINGS)


MAKERS: Final[dict[str, Callable[[nn.Module, Masks], Contender]]] = {
    "dense": Dense,
    "masked": Masked,
    "autocast": Autocast,
    "samo": Samo,
    "samo-torch": SamoTorch,
    "lean": Lean,
    "streamed": functools.partial(Samo, weights="streamed"),
    "streamed-lean": functools.partial(Lean, weights="streamed"),
    "flashoptim": FlashOptim,
    "flashoptim-release": FlashOptimRelease,
    "torchao": Torchao,
    "bitsandbytes": Bitsandbytes,
}

BYTES: Final = {
    "dense": 21,
    "masked": 21,
    "autocast": 18,
    "samo": 6,
    "samo-torch": 6,
    "lean": 5,
    "streamed": 4,
    "streamed-lean": 3,
    "flashoptim": 8,
    "flashoptim-release": 6,
    "torchao": 7,
    "bitsandbytes": 7,
}
"""Bytes a parameter that each holds at most: enough to say whether several fit beside each other."""


def maker(name: str) -> Callable[[nn.Module, Masks], Contender]:
    """Return what makes a contender, one with a budget too.

    Example:
        >>> from samo.bench.contenders import maker
        >>> maker("budget-50%-lean")
        functools.partial(<class 'samo.bench.contenders.Lean'>, weights=0.5)
    """
    if name in MAKERS:
        return MAKERS[name]
    made, share = _budget(name)
    return functools.partial({"samo": Samo, "lean": Lean}[made], weights=share)


def bytes_a_parameter(name: str) -> int:
    """Return the bytes a parameter that a contender holds at most; with a budget, as if all were resident.

    Example:
        >>> from samo.bench.contenders import bytes_a_parameter
        >>> bytes_a_parameter("budget-50%")
        6
    """
    return BYTES[name if name in BYTES else _budget(name)[0]]


def _budget(name: str) -> tuple[Literal["samo", "lean"], float]:
    """Return which contender it is whose dense weights are in part resident, and the part."""
    found = re.fullmatch(r"budget-([0-9.e-]+)%(-lean)?", name)
    assert found, f"{name} has no budget"
    return "lean" if found[2] else "samo", float(found[1]) / 100


def peer(module: str) -> Any:
    """Import a library that is compared with.

    Raises:
        UnavailableError: It is not installed here, or cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"not installed ({error})") from error


def zero_(dense: Tensor, mask: Mask) -> None:
    """Set pruned entries to 0 with the kernels, a fraction of a step's time even on large models."""
    chosen = kernels.choose(dense.device)
    kept_Z = torch.empty(mask.kept, dtype=dense.dtype, device=dense.device)
    chosen.compress_(dense.detach(), mask, kept_Z)
    chosen.expand_(kept_Z, mask, dense.detach())


def held_bytes(
    modules: Iterable[nn.Module], optimizers: Iterable[Any], more: Iterable[Tensor | None] = ()
) -> int:
    """Sum the storages of parameters, gradients, buffers, optimizer state and ``more``, each once.

    Example:
        >>> import torch
        >>> from samo.bench.contenders import held_bytes
        >>> layer = torch.nn.Linear(10, 10, bias=False)
        >>> layer(torch.ones(1, 10)).sum().backward()
        >>> held_bytes([layer], [])
        800
    """
    found: list[Any] = list(more)
    for module in modules:
        found += module.buffers()
        found += [tensor for param in module.parameters() for tensor in (param, param.grad)]
    found += [optimizer.state for optimizer in optimizers]
    storages: dict[int, int] = {}
    for entry in found:
        for plain in _plain(entry):
            storage = plain.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _plain(value: Any) -> list[Tensor]:
    """Return the tensors inside of a value: of containers, tensor subclasses and objects around them."""
    if isinstance(value, Tensor):
        if not hasattr(value, "__tensor_flatten__"):
            return [value]
        names, _ = value.__tensor_flatten__()
        inside = [getattr(value, name) for name in names]
    elif isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values())
        inside = [entry for entry in inside if isinstance(entry, Tensor)]
    return [tensor for entry in inside for tensor in _plain(entry)]
