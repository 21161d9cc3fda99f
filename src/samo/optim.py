"""`AdamW` on compressed state, exact or lean: no fp32 copy of weights or gradients."""

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from samo.errors import CompressionError, MaskError
from samo.kernels import AdamWSettings, AdamWUpdate, AgedUpdate, LeanUpdate
from samo.kernels.ages import ages_at
from samo.kernels.lean import num_groups, quantise_weight
from samo.kernels.rounding import master_dtype, rest_dtype
from samo.mask import Mask
from samo.stepping import agree, tell_scalers
from samo.weights import Weight, note_changes, weight_of

__all__ = ["AdamW"]

_REST_KEYS: Final = {
    torch.int16: "remainder",
    torch.int8: "correction",
    torch.float32: "master",
}
"""Name, in the optimizer's state, of what is stored beside a weight, by its type."""

_AGE: Final = "age"
"""Name of the updates that each entry has had."""


class AdamW(Optimizer):
    """AdamW that updates a compressed model in place, in fp32.

    Exact state for each kept weight: two fp32 moments and, for bfloat16 weights, the 16-bit remainder
    that completes the weight to its fp32 master. With float32 weights a step is that of torch's unfused
    ``torch.optim.AdamW`` on the masked dense model: bit for bit with ``kernels="reference"``, and
    within 3 units in the last place with the faster ones.

    Lean state: both moments in 8 bits each, with two fp32 scales for 1,024 entries of a pruned weight
    (256 of an unpruned one), and an 8-bit correction instead of the remainder: 3 bytes for each kept
    weight instead of 10. Moments are a few percent off. float32 weights have no correction, and float16
    weights keep their fp32 master. The fast kernels for it are those of an NVIDIA GPU.

    A gradient with a NaN or an infinity anywhere makes the whole step do nothing, moments and step
    counts included, without waiting for the device; ``skipped_steps`` counts them.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.5), dtype=torch.bfloat16)
        >>> opt = samo.AdamW(samo.parameters(model), lr=3e-4, weight_decay=0.1)
        >>> model(torch.randn(4, 16, dtype=torch.bfloat16)).float().square().mean().backward()
        >>> opt.step()
        >>> opt.zero_grad()
        >>> opt.skipped_steps
        0

    Args:
        params: ``samo.parameters(model)``, or groups as from ``samo.param_groups``.
        lr: Learning rate, a number or a scalar tensor.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        state: "exact", or "lean" for 8-bit state.
        entry_steps: Count the updates of each kept entry of pruned weights, in 2 bytes each, so that
            entries which `samo.remap_` adds late get Adam's bias correction for their own age. Without
            such entries results are the same bit for bit (on a GPU, float64 and ``density_power``: but for
            the last digit).
        density_power: A weight with a mask has its learning rate multiplied by its kept fraction to this
            power, from -3 to 3: -1 makes one pruned by 90 % learn 10 times as fast. Its decay stays.
            Models that are pruned before they have learnt much want that; 0 leaves rates alone.

    Raises:
        ValueError: A setting is out of range, or a float64 weight would get lean state, or
            ``entry_steps`` is asked for with lean state.
        CompressionError: A parameter is not a leaf of a compressed model.
    """

    updates_compressed_state = True
    _skipped: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state: Literal["exact", "lean"] = "exact",
        entry_steps: bool = False,
        density_power: float = 0.0,
    ) -> None:
        if state not in ("exact", "lean"):
            raise ValueError(f"state must be 'exact' or 'lean', got {state!r}")
        if entry_steps and state == "lean":
            raise ValueError(
                "entry_steps=True goes with state='exact' alone, got state='lean', whose updates correct "
                "all entries of a weight alike; leave out one of the two"
            )
        self.is_lean: Final = state == "lean"
        self.entry_steps: Final = entry_steps
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults["density_power"] = density_power
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add leaves, for example of a part of the model that was frozen so far.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, sparsity=0.5))
            >>> opt = samo.AdamW(samo.parameters(model[1]), lr=1e-3)
            >>> opt.add_param_group({"params": samo.parameters(model[0]), "lr": 1e-4})
            >>> [group["lr"] for group in opt.param_groups]
            [0.001, 0.0001]
        """
        tensors = param_group["params"]
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        _check_settings({**self.defaults, **param_group})
        for tensor in tensors:
            weight = weight_of(tensor) if isinstance(tensor, Tensor) else None
            if weight is None or tensor is not weight.leaf:
                what = getattr(tensor, "shape", type(tensor).__name__)
                raise CompressionError(
                    f"samo.AdamW updates the leaves of a compressed model, got {what}, which is none "
                    "of them; build it on samo.parameters(model), and give other parameters to an "
                    "optimizer of their own"
                )
            if self.entry_steps and weight.whole is not weight:
                raise CompressionError(
                    f"'{weight.name}' has its state on several ranks (shard='state'), where entries have "
                    "no step counts of their own; leave out entry_steps, or replicate with shard=None"
                )
            if self.is_lean and weight.dtype == torch.float64:
                raise ValueError(
                    f"'{weight.name}' is float64, which lean state has too few digits for; pass "
                    "state='exact', or compress the model with dtype=torch.float32"
                )
        super().add_param_group({**param_group, "params": tensors})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict` or a copy brings, also from before a setting was there."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("density_power", 0.0)

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was not finite; waits for the device."""
        return 0 if self._skipped is None else int(self._skipped)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the model from its compressed gradients.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, sparsity=0.5))
            >>> opt = samo.AdamW(samo.parameters(model), lr=0.1)
            >>> def closure():
            ...     opt.zero_grad()
            ...     loss = model(torch.ones(1, 8)).square().sum()
            ...     loss.backward()
            ...     return loss
            >>> before = opt.step(closure)
            >>> bool(model(torch.ones(1, 8)).square().sum() < before)
            True

        Args:
            closure: Computes loss and gradients once more and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            CompressionError: It is called while a CUDA graph is captured.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise CompressionError(
                "samo.AdamW.step cannot be part of a CUDA graph: addresses of the gradients are sent "
                "from the host in each step; capture forward and backward, and call step() after "
                "each replay"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, _with_gradient(group)) for group in self.param_groups]
        weights = [weight for _, members in groups for weight, _ in members]
        if not weights:
            return loss
        gradients = [gradient for _, members in groups for _, gradient in members]
        nonfinite = agree(weights, weights[0].kernels.find_nonfinite(gradients))
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.int64, device=nonfinite.device)
        self._skipped += nonfinite
        tell_scalers(weights, nonfinite)
        for weight in weights:
            weight.was_skipped = nonfinite
        # A CPU's result is here already; another device's is used there, without waiting for it.
        if nonfinite.device.type == "cpu" and bool(nonfinite):
            return loss
        skip = None if nonfinite.device.type == "cpu" else nonfinite
        for group, members in groups:
            self._update(group, members, skip)
        return loss

    def _update(
        self, group: dict[str, Any], members: list[tuple[Weight, Tensor]], skip: Tensor | None
    ) -> None:
        if not members:
            return
        beta1, beta2 = group["betas"]
        power = group["density_power"]
        settings = AdamWSettings(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        plain: list[AdamWUpdate] = []
        lean: list[LeanUpdate] = []
        aged: list[AgedUpdate] = []
        for weight, gradient in members:
            state = self._state_of(weight)
            update = AdamWUpdate(
                weight.param,
                weight.mask,
                weight.rest,
                gradient,
                state["exp_avg"],
                state["exp_avg_sq"],
                state["step"],
                lr_scale(weight.whole.mask, power) if power else 1.0,
            )
            if self.is_lean:
                lean.append(LeanUpdate(update, state["exp_avg_scale"], state["exp_avg_sq_scale"]))
            elif _AGE in state:
                aged.append(AgedUpdate(update, state[_AGE]))
            else:
                plain.append(update)
        if lean:
            members[0][0].lean_kernels.adamw_lean_(lean, settings, skip)
        if aged:
            members[0][0].aged_kernels.adamw_aged_(aged, settings, skip)
        if plain:
            members[0][0].kernels.adamw_(plain, settings, skip)
        note_changes([weight for weight, _ in members])

    def _state_of(self, weight: Weight) -> dict[str, Any]:
        state = self.state[weight.leaf]
        weight.stepped_by = weakref.ref(self)
        if not state:
            grad = weight.leaf.grad
            assert grad is not None
            if weight.dtype == torch.float16 and weight.scaler is None:
                warnings.warn(
                    f"'{weight.name}' is float16 and trained without a loss scaler, so small "
                    "gradients vanish; use scaler = samo.LossScaler(model) and "
                    "scaler.scale(loss).backward()",
                    stacklevel=4,
                )
            state["step"] = torch.zeros((), dtype=torch.float32, device=grad.device)
            for key, (dtype, size) in self._layout(weight).items():
                state[key] = torch.zeros(size, dtype=dtype, device=grad.device)
        rest = weight.ensure_rest(is_lean=self.is_lean)
        if rest is not None:
            key = _REST_KEYS[rest.dtype]
            saved = state.get(key)
            if saved is not rest:
                if saved is not None:
                    rest.copy_(saved)  # a loaded one, whenever the weights were loaded
                state[key] = rest
        return state

    def _layout(self, weight: Weight) -> dict[str, tuple[torch.dtype, int]]:
        """Return type and size of what is kept for a weight beside its step count and its rest."""
        if not self.is_lean:
            moment = (master_dtype(weight.dtype), weight.kept)
            layout = {"exp_avg": moment, "exp_avg_sq": moment}
            if self.entry_steps and weight.mask is not None:
                layout[_AGE] = (torch.int16, weight.kept)
            return layout
        scale = (torch.float32, num_groups(weight.param.numel(), weight.mask))
        return {
            "exp_avg": (torch.int8, weight.kept),
            "exp_avg_sq": (torch.uint8, weight.kept),
            "exp_avg_scale": scale,
            "exp_avg_sq_scale": scale,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, and the fingerprints of the masks it belongs to.

        The tensors are the live ones; nothing is copied.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
            >>> opt = samo.AdamW(samo.parameters(model))
            >>> model(torch.randn(2, 8, dtype=torch.bfloat16)).float().sum().backward()
            >>> opt.step()
            >>> sorted(opt.state_dict()["state"][0])
            ['exp_avg', 'exp_avg_sq', 'remainder', 'step']
        """
        packed = super().state_dict()
        packed["masks"] = {
            index: None if weight.mask is None else weight.mask.fingerprint()
            for index, weight in enumerate(self._all_weights())
        }
        packed["skipped_steps"] = self.skipped_steps
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, before or after the model takes over its own.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> model = samo.compress_(model, samo.prune(model, 0.5))
            >>> opt = samo.AdamW(samo.parameters(model))
            >>> opt.load_state_dict(opt.state_dict())

        Raises:
            ValueError: The groups do not match.
            MaskError: The state belongs to other masks, or to weights of another type.
        """
        saved = state_dict["state"]
        weights = self._all_weights()
        for index, weight in enumerate(weights):
            mask = None if weight.mask is None else weight.mask.fingerprint()
            if index in saved and state_dict.get("masks", {}).get(index) != mask:
                raise MaskError(
                    f"the saved optimizer state of '{weight.name}' belongs to another mask; load it "
                    "into a model compressed with the masks it was trained with"
                )
            if index in saved:
                self._check_loaded(weight, saved[index])
        super().load_state_dict({**state_dict, "state": {}})  # groups; torch would cast the state
        for index, weight in enumerate(weights):
            if index not in saved:
                continue
            self.state[weight.leaf] = {
                key: value.to(weight.device, copy=True) for key, value in saved[index].items()
            }
            weight.stepped_by = weakref.ref(self)
        skipped = state_dict.get("skipped_steps", 0)
        self._skipped = torch.tensor(skipped, device=weights[0].device) if weights else None

    def _check_loaded(self, weight: Weight, state: dict[str, Any]) -> None:
        """Refuse a saved state that is not of this weight's types and sizes."""
        found = {key: (value.dtype, *value.shape) for key, value in state.items() if key != "step"}
        is_lean = "exp_avg_scale" in found
        if is_lean != self.is_lean:
            kinds = ("exact", "lean")
            raise MaskError(
                f"the saved optimizer state of '{weight.name}' is {kinds[is_lean]}, and this optimizer "
                f"keeps {kinds[self.is_lean]} state; build it with state='{kinds[is_lean]}'"
            )
        expected = self._layout(weight)
        if (_AGE in found) != (_AGE in expected):
            raise MaskError(
                f"the saved optimizer state of '{weight.name}' has {'' if _AGE in found else 'no '}step "
                f"counts of its entries; build the optimizer with entry_steps={_AGE in found}"
            )
        rest = rest_dtype(weight.dtype, is_lean=self.is_lean)
        if rest is not None:
            expected[_REST_KEYS[rest]] = (rest, weight.kept)
        if found != expected:
            raise MaskError(
                f"the saved optimizer state of '{weight.name}' holds {found}, but weights of "
                f"{weight.dtype} need {expected}; compress the model with the dtype it was "
                "trained with"
            )

    @torch.no_grad()
    def carry_over(self, dense: Optimizer) -> None:
        """Go on from the moments of the optimizer that trained the model before it was compressed.

        Without this the first steps after pruning divide by moments that know one gradient each.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> dense = torch.optim.AdamW(model.parameters())
            >>> model(torch.ones(1, 8)).sum().backward()
            >>> dense.step()
            >>> model = samo.compress_(model, samo.prune(model, 0.5))
            >>> opt = samo.AdamW(samo.parameters(model))
            >>> opt.carry_over(dense)
            >>> [state["exp_avg"].shape for state in opt.state.values()]
            [torch.Size([32]), torch.Size([8])]

        Args:
            dense: An Adam or AdamW of torch over the same parameters.

        Raises:
            ValueError: It keeps other state than Adam's.
        """
        weights = self._all_weights()
        for weight in weights:
            found = set(dense.state.get(weight.whole.param, {"step", "exp_avg", "exp_avg_sq"}))
            if found != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(
                    f"carry_over takes the state of Adam or AdamW, but for '{weight.name}' "
                    f"{type(dense).__name__} keeps {', '.join(sorted(found)) or 'nothing'}; leave it "
                    "out, and the moments start at 0"
                )
        for weight in weights:
            old = dense.state.get(weight.whole.param)
            if old is None:  # it had no gradient so far
                continue
            state: dict[str, Any] = {
                "step": torch.as_tensor(
                    old["step"], dtype=torch.float32, device=weight.device
                ).clone()
            }
            moments = {}
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key] = weight.gather(old[key].to(weight.device, master_dtype(weight.dtype)))
            if self.is_lean:
                exp_avg, exp_avg_sq = moments.values()
                codes = quantise_weight(exp_avg, exp_avg_sq, weight.param.numel(), weight.mask)
                moments = dict(zip(self._layout(weight), codes))
            if _AGE in self._layout(weight):
                moments[_AGE] = ages_at(state["step"], weight.kept)
            self.state[weight.leaf] = {**state, **moments}
            weight.stepped_by = weakref.ref(self)

    def _all_weights(self) -> list[Weight]:
        return _weights_of(leaf for group in self.param_groups for leaf in group["params"])


def _with_gradient(group: dict[str, Any]) -> list[tuple[Weight, Tensor]]:
    """Return the weights of a group that have a gradient, ready to be updated, and the gradients."""
    leaves = [leaf for leaf in group["params"] if leaf.grad is not None]
    members = []
    for weight in _weights_of(leaves):
        weight.check()
        if weight.is_lent:
            weight.reclaim()
        members.append((weight, weight.leaf.grad))
    return members  # type: ignore[return-value]


def _weights_of(leaves: Iterable[Tensor]) -> list[Weight]:
    weights = []
    for leaf in leaves:
        weight = weight_of(leaf)
        if weight is None:
            raise CompressionError(
                "the compressed model of this optimizer no longer exists, or the optimizer was copied "
                "without it; keep the model, and build an optimizer for each copy of it"
            )
        weights.append(weight)
    return weights


def lr_scale(mask: Mask | None, power: float) -> float:
    """Return the factor on the learning rate of a weight.

    Example:
        >>> lr_scale(Mask.from_bool(torch.tensor([True, False, False, False])), -1.0)
        4.0
    """
    if mask is None or mask.kept == 0:
        return 1.0
    return (mask.kept / mask.numel) ** power


def _check_settings(group: dict[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if not isinstance(lr, Tensor) and not lr >= 0:
        raise ValueError(f"lr must be 0 or more, got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    if not group["eps"] >= 0:
        raise ValueError(f"eps must be 0 or more, got {group['eps']}")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay must be 0 or more, got {group['weight_decay']}")
    power = group["density_power"]
    if not isinstance(power, int | float) or not -3 <= power <= 3:
        raise ValueError(
            f"density_power must be a number from -3 to 3, got {power!r}; -1 makes weights that are pruned by 90 % "
            "learn 10 times as fast, and 0 as fast as all others"
        )
