"""Ways to train a pruned GPT that ``samo bench step`` compares.

dense                 bfloat16 model, fp32 master and fp32 gradient, fused AdamW; not pruned
masked                the same on the pruned weights
samo                  bfloat16 kept values as parameters, their remainders in samo's AdamW
samo-torch            kept values as parameters, torch's fused AdamW, fp32 gradients
lean                  bfloat16 kept values, 8-bit state
streamed              as samo, without resident dense weights: each is expanded when it is used
streamed-lean         as lean, likewise

Masked training sets pruned weights back to 0 after each step, which is not timed.
"""

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samo import kernels
from samo.core.adamw import AdamW
from samo.core.compress import compress_
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.memory.ledger import Ledger, ledger

SETTINGS: Final[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
"""Of every contender's AdamW."""


class Contender:
    """A bfloat16 model and its optimizer; masked if masks are given."""

    optimizer: Any

    def __init__(self, model: nn.Module, masks: Masks | None = None) -> None:
        self.model = model
        self.masks: dict[str, Mask] = dict(masks or {})
        self.keep_masks()

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward; return the loss."""
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        return loss.detach()

    @cached_property
    def params(self) -> list[Tensor]:
        """The model's parameters."""
        return list(self.model.parameters())

    def update(self) -> None:
        """Step the optimizer and free the gradients, all in the same way."""
        self.optimizer.step()
        for param in self.params:
            param.grad = None

    def keep_masks(self) -> None:
        """Set pruned weights back to 0; not timed."""
        for name, mask in self.masks.items():
            zero_(self.model.get_parameter(name), mask)

    def held(self) -> Iterable[Any]:
        """Return what is held between backward and update: containers of tensors."""
        masks = [(mask.words, mask.offsets) for mask in self.masks.values()]
        grads = [param.grad for param in self.params]
        return [self.params, grads, list(self.model.buffers()), dict(self.optimizer.state), masks]

    def state_bytes(self) -> int:
        """Return the bytes of what is `held`, each storage once."""
        tensors = [leaf for leaf in tree_leaves(self.held()) if isinstance(leaf, Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def account(self) -> Ledger | None:
        """Return the ledger of a compressed model."""
        return None


class Dense(Contender):
    """A bfloat16 model with an fp32 master and an fp32 copy of the gradient."""

    def __init__(self, model: nn.Module, masks: Masks, *, is_masked: bool = False) -> None:
        self.masters: dict[str, Tensor] = {}
        for name, param in model.named_parameters():
            self.masters[name] = master = nn.Parameter(param.detach().float())
            master.grad = torch.zeros_like(master)
        super().__init__(model, masks if is_masked else None)
        self.optimizer = torch.optim.AdamW(self.masters.values(), fused=True, **SETTINGS)

    def update(self) -> None:
        masters = list(self.masters.values())
        wide: list[Any] = [master.grad for master in masters]
        narrow: list[Any] = [param.grad for param in self.params]
        torch._foreach_copy_(wide, narrow)
        super().update()
        with torch.no_grad():
            torch._foreach_copy_(self.params, masters)

    def keep_masks(self) -> None:
        super().keep_masks()
        for name, mask in self.masks.items():
            zero_(self.masters[name], mask)

    def held(self) -> Iterable[Any]:
        masters = list(self.masters.values())
        return [*super().held(), masters, [master.grad for master in masters]]


class Samo(Contender):
    """Kept values as parameters; ``state="torch"`` uses torch's fused AdamW."""

    def __init__(
        self,
        model: nn.Module,
        masks: Masks,
        *,
        weights: Literal["resident", "streamed"] | int = "resident",
        state: Literal["exact", "lean", "torch"] = "exact",
    ) -> None:
        super().__init__(model)
        narrow = None if state == "torch" else torch.bfloat16
        compress_(model, masks, weights=weights, grad_dtype=narrow, value_dtype=narrow)
        if state == "torch":
            self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)
        else:
            self.optimizer = AdamW(model.parameters(), state=state, **SETTINGS)

    def state_bytes(self) -> int:
        account = self.account()
        return account.measured_bytes + account.other_bytes

    def account(self) -> Ledger:
        return ledger(self.model, self.optimizer)


CONTENDERS: Final[dict[str, Callable[[nn.Module, Masks], Contender]]] = {
    "dense": Dense,
    "masked": partial(Dense, is_masked=True),
    "samo": Samo,
    "samo-torch": partial(Samo, state="torch"),
    "lean": partial(Samo, state="lean"),
    "streamed": partial(Samo, weights="streamed"),
    "streamed-lean": partial(Samo, weights="streamed", state="lean"),
}
"""What ``samo bench step`` can measure, in the order of its table."""


def zero_(dense: Tensor, mask: Mask) -> None:
    """Set pruned entries to 0 with the kernels, which takes a fraction of a step."""
    chosen = kernels.choose(dense.device)
    kept_Z = torch.empty(mask.kept, dtype=dense.dtype, device=dense.device)
    chosen.compress_(dense.detach(), mask, kept_Z)
    chosen.expand_(kept_Z, mask, dense.detach())
