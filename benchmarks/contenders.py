"""Further contenders of ``samo bench step``: budgets of resident weights, and other projects.

autocast              fp32 model under autocast, fused AdamW; not pruned
budget-50%            as samo, with half of the dense weights resident and the others streamed
budget-50%-lean       as lean, likewise
flashoptim            FlashOptim's AdamW: 24-bit weights, 8-bit moments
flashoptim-release    the same, each weight updated in backward and its gradient freed
torchao               its AdamW8bit on bfloat16 weights, with stochastic rounding
bitsandbytes          its AdamW8bit on bfloat16 weights

The other projects hold gradients and state for every weight. They keep their masks by setting
pruned weights back to 0 after each step, which is not timed.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from benchmarks.measure import held_bytes
from samo.bench.contenders import SETTINGS, Contender, Samo
from samo.mask.masks import Masks


class UnavailableError(Exception):
    """A contender that cannot take part here; its message goes into the row."""


class Autocast(Contender):
    """A float32 model that computes in bfloat16."""

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        super().__init__(model.float())
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss: Tensor = self.model(tokens, targets)
        loss.backward()
        return loss.detach()


class Peer(Contender):
    """An optimizer of another project on the masked model."""

    def state_bytes(self) -> int:
        return held_bytes(self.held())


class EightBit(Peer):
    """An AdamW8bit, of torchao or bitsandbytes."""

    def __init__(self, model: nn.Module, masks: Masks, *, library: str, **options: Any) -> None:
        adamw = peer(library).AdamW8bit
        super().__init__(model, masks)
        self.optimizer = adamw(model.parameters(), **options, **SETTINGS)


class FlashOptim(Peer):
    """FlashOptim, which stores weights in 24 bits and moments in 8."""

    def __init__(self, model: nn.Module, masks: Masks, *, releases: bool = False) -> None:
        library = peer("flashoptim")
        if next(model.parameters()).device.type != "cuda":
            raise UnavailableError("FlashOptim needs an NVIDIA GPU")
        super().__init__(model, masks)
        self.optimizer = library.FlashAdamW(model.parameters(), **SETTINGS)
        self._releases = releases
        if releases:
            self._release = library.enable_gradient_release(model, self.optimizer)

    def update(self) -> None:
        if not self._releases:  # else backward has stepped already
            super().update()


def budget(
    model: nn.Module, masks: Masks, *, share: float, state: Literal["exact", "lean"] = "exact"
) -> Samo:
    """Return samo with a fraction of the bytes of all dense weights resident."""
    dense = sum(model.get_parameter(name).nbytes for name in masks)
    return Samo(model, masks, weights=int(share * dense), state=state)


def peer(module: str) -> Any:
    """Import another project's module.

    Raises:
        UnavailableError: It is not installed, or cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"not installed ({error})") from error


SHARES: Final = (0.25, 0.5, 0.75)

CONTENDERS: Final[dict[str, Callable[[nn.Module, Masks], Contender]]] = {
    "autocast": Autocast,
    **{f"budget-{share:.0%}": functools.partial(budget, share=share) for share in SHARES},
    **{
        f"budget-{share:.0%}-lean": functools.partial(budget, share=share, state="lean")
        for share in SHARES
    },
    "flashoptim": FlashOptim,
    "flashoptim-release": functools.partial(FlashOptim, releases=True),
    "torchao": functools.partial(EightBit, library="torchao.optim", bf16_stochastic_round=True),
    "bitsandbytes": functools.partial(EightBit, library="bitsandbytes.optim"),
}
"""By name, in the order of the table."""
