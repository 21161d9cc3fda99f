"""`AdamW` for compressed models and any other parameters: one fused pass, exact or lean state."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.profiler import record_function

from samo import kernels as _kernels
from samo.core.shards import any_rank, local_of, shard_groups
from samo.core.weight import Weight, weight_of, weight_replacing
from samo.errors import CompressionError, MaskError
from samo.kernels import AdamWSettings, AdamWUpdate
from samo.kernels.lean import num_groups, quantise_weight
from samo.kernels.reference import ages_at
from samo.kernels.rounding import master_dtype, remainder_dtype
from samo.utils.validation import finite_number

_update: Final[Callable[..., AdamWUpdate]] = partial(tuple.__new__, AdamWUpdate)
"""`AdamWUpdate` without the cost of its constructor, a third of the time spent on a parameter."""


class AdamW(Optimizer):
    """AdamW for ``model.parameters()``, in fp32 arithmetic and one fused pass.

    With ``kernels="reference"`` a step equals torch's unfused ``torch.optim.AdamW`` bit for bit;
    faster kernels are within 3 units in the last place. Gradients may have any dtype
    (``compress_(grad_dtype=torch.bfloat16)``). The step also refreshes the dense weights of a
    compressed model. bfloat16 parameters are updated as if they were fp32: the rounding remainder
    is optimizer state.

    Lean state is 3 bytes per bfloat16 parameter instead of 10: 8-bit moments with fp32 scales for
    groups of entries, and 8 bits of the rounding remainder. Moments are off by a few percent.

    If any gradient has a NaN or an infinity, the whole step does nothing, without waiting for the
    device. ``skipped_steps`` counts such steps, and ten in a row give a warning.

    DTensors, such as FSDP2's, are updated shard by shard, with exact state that is sharded alike.
    Ranks that share a parameter skip a step together.

    A step can be captured in a CUDA graph after one step outside of it. The graph keeps all
    settings, except a learning rate that is a tensor on the parameters' device.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        >>> model = samo.compress_(model, samo.prune(model, sparsity=0.5), dtype=torch.bfloat16)
        >>> opt = samo.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
        >>> model(torch.randn(4, 16, dtype=torch.bfloat16)).float().square().mean().backward()
        >>> opt.step()
        >>> opt.zero_grad()
        >>> opt.skipped_steps
        0

    Args:
        params: Parameters, named parameters, or groups, such as those of `samo.param_groups`.
        lr, betas, eps, weight_decay: As in ``torch.optim.AdamW``.
        state: ``"exact"``, or ``"lean"`` for 8-bit state.
        entry_steps: Count the updates of each kept entry of pruned weights, in 2 bytes each, so
            that entries added by `samo.remap_` get Adam's bias correction for their own age.
        group: Process group whose ranks skip steps together, for ``ZeroRedundancyOptimizer``.
            DistributedDataParallel needs none: its ranks have the same gradients.
        kernels: ``"auto"`` picks the fastest for the device, ``"reference"`` uses plain torch.
        fused, capturable: Accepted for compatibility with torch; a step is always both.
    """

    refreshes_dense_weights = True
    _skipped: Tensor | None = None
    """Skipped steps: in all, and in a row."""
    _skipped_on_host: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state: Literal["exact", "lean"] = "exact",
        entry_steps: bool = False,
        *,
        group: dist.ProcessGroup | None = None,
        kernels: _kernels.Path = "auto",
        fused: bool | None = None,
        capturable: bool = True,
    ) -> None:
        if state not in ("exact", "lean"):
            raise ValueError(f"state must be 'exact' (fp32) or 'lean' (8-bit), got {state!r}")
        if isinstance(params, torch.nn.Module):
            name = type(params).__name__
            raise TypeError(f"params must be tensors, got the module {name}; use .parameters()")
        if entry_steps and state == "lean":
            raise ValueError("entry_steps=True goes with state='exact' alone, got state='lean'")
        if kernels not in _kernels.PATHS:
            raise ValueError(f"kernels must be one of {_kernels.PATHS}, got {kernels!r}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not isinstance(value, Tensor) and not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        self.group = group
        # In the groups, since a copied optimizer has nothing else.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "lean": state == "lean",
            "entry_steps": entry_steps,
            "kernels": kernels,
        }
        super().__init__(params, defaults)
        for param_group in self.param_groups:
            for param in param_group["params"]:
                if param.requires_grad:  # others are checked at their first gradient
                    _check_param(param, param_group)

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was not finite; waits for the device."""
        return 0 if self._skipped is None else int(self._skipped[0])

    @torch.compiler.disable  # it launches kernels by itself
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients; return the loss of ``closure``, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with record_function("samo.AdamW.collect"):
            batches, sharded = self._collect()
        groups = shard_groups(sharded)
        if not batches and not groups and self.group is None:
            return loss
        with record_function("samo.AdamW.find_nonfinite"):
            skip = self._find_nonfinite(batches, groups)
        with record_function("samo.AdamW.update"):
            # A CPU knows the result already. A GPU reads it there, and the host does not wait.
            if skip.device.type != "cpu" or not bool(skip):
                for batch in batches:
                    batch.update(None if skip.device.type == "cpu" else skip.to(batch.device))
        return loss

    def _collect(self) -> tuple[list["_Batch"], list[DTensor]]:
        """Return the updates of this step, and all DTensors.

        Small models are host-bound on this loop: it calls no function of Python that it need not.
        """
        # Mostly, states are in the order of parameters. A look-up costs more: the hash of a tensor
        # is a function of Python. A copy, since look-ups add states.
        states = self.state
        in_order = iter([*states.items()])
        owner, state_of_owner = next(in_order, (None, {}))
        batches: dict[tuple[Any, ...], _Batch] = {}
        sharded: list[DTensor] = []
        for group in self.param_groups:
            lr, weight_decay = group["lr"], group["weight_decay"]
            is_lean, has_ages = group["lean"], group["entry_steps"]
            remainder = "correction" if is_lean else "remainder"
            batch = None
            for param in group["params"]:
                is_sharded = type(param) is DTensor
                if is_sharded:
                    sharded.append(param)
                state: dict[str, Any] | None = None
                if param is owner:
                    state = state_of_owner
                    owner, state_of_owner = next(in_order, (None, {}))
                grad = param.grad
                if grad is None:
                    continue
                if grad.is_sparse:
                    grad = grad.to_dense()
                if batch is None or batch.index != param.get_device():
                    settings = (*group["betas"], group["eps"], group["lean"], group["kernels"])
                    key = (*settings, param.device)
                    if key not in batches:
                        batches[key] = _Batch(group, param.device, param.get_device())
                    batch = batches[key]
                weight = None if is_sharded else weight_of(param)
                dense = mask = None
                if weight is not None:
                    dense = weight.dense
                    if weight.expansions or (
                        dense is not None and dense._version != weight._dense_version
                    ):
                        weight.sync_written()
                    mask = weight.layout.mask
                    if dense is not None:
                        batch.weights.append(weight)
                if state is None:
                    state = states[param]
                if not state:
                    self._init_state(param, weight, group)
                update = _update(
                    (
                        param,
                        state.get(remainder),
                        grad,
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        state["step"],
                        lr,
                        weight_decay,
                        dense,
                        mask,
                        state.get("age") if has_ages else None,
                        state.get("exp_avg_scale") if is_lean else None,
                        state.get("exp_avg_sq_scale") if is_lean else None,
                    )
                )
                if is_sharded:
                    update = _local(update)
                batch.params.append(param)
                batch.updates.append(update)
        if _is_captured():
            for batch in batches.values():
                if batch.index < 0:
                    raise CompressionError(
                        f"{_name(batch.params[0])} is on the CPU, and a CUDA graph cannot update "
                        "it; give it to another optimizer, which is not captured"
                    )
        return list(batches.values()), sharded

    def _find_nonfinite(
        self, batches: list["_Batch"], groups: dict[dist.ProcessGroup, str]
    ) -> Tensor:
        """Return whether to skip the step: a gradient is not finite on any rank of the groups.

        Collective: every rank calls this, with or without gradients. Counts skipped steps too.
        """
        flags = [batch.kernels.find_nonfinite([u.grad for u in batch.updates]) for batch in batches]
        params = (param for group in self.param_groups for param in group["params"])
        device = next((param.device for param in params), torch.device("cpu"))
        flag = flags[0].to(device) if flags else torch.zeros((), dtype=torch.bool, device=device)
        for other in flags[1:]:
            flag = flag | other.to(device)
        for group, device_type in groups.items():
            flag = any_rank(flag, group, device_type)
        if self.group is not None:
            flag = any_rank(flag, self.group, flag.device.type)
        if self._skipped is None:
            _check_not_captured("the count of skipped steps")
            self._skipped = torch.zeros(2, dtype=torch.int64, device=flag.device)
            self._skipped_on_host = torch.zeros(
                2, dtype=torch.int64, device="cpu", pin_memory=self._skipped.is_cuda
            )
        self._skipped.add_(flag)
        self._skipped[1].mul_(flag)  # a step that is done ends the row
        assert self._skipped_on_host is not None
        # Reads what an earlier step sent, so as not to wait for the device.
        num_skipped, num_in_a_row = self._skipped_on_host.tolist()
        if num_in_a_row and num_in_a_row % 10 == 0:
            warnings.warn(
                f"{num_in_a_row} steps in a row were skipped ({num_skipped} in all): a gradient is "
                "NaN or infinite. Use torch.autograd.set_detect_anomaly(True) to find out where, "
                "or lower the loss scale",
                stacklevel=4,
            )
        self._skipped_on_host.copy_(self._skipped, non_blocking=True)
        return flag

    def _init_state(self, param: Tensor, weight: Weight | None, group: dict[str, Any]) -> None:
        _check_not_captured(f"the state of {_name(param)}")
        _check_param(param, group)
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for key, (dtype, shape) in state_layout(param, weight, group).items():
            if shape == param.shape:  # with its strides
                state[key] = torch.zeros_like(param, dtype=dtype)
            else:
                state[key] = torch.zeros(shape, dtype=dtype, device=param.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, before or after the model's."""
        own, saved = self.param_groups, state_dict["param_groups"]
        found = []
        if [len(group["params"]) for group in own] == [len(group["params"]) for group in saved]:
            # Keys are numbers, or the names that torch.distributed.checkpoint uses.
            keys = [key for group in saved for key in group["params"]]
            pairs = [(param, group) for group in own for param in group["params"]]
            for key, (param, group) in zip(keys, pairs):
                if key in state_dict["state"]:
                    state = state_dict["state"][key]
                    _check_loaded(param, group, state)
                    found.append((param, state))
        # torch checks the groups. It would cast 8-bit state.
        super().load_state_dict({**state_dict, "state": {}})
        for param, state in found:
            self.state[param] = {
                key: torch.as_tensor(value).to(param.device, copy=True)
                for key, value in state.items()
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or what `load_state_dict` loaded."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key in ("lean", "entry_steps", "kernels"):
                group.setdefault(key, self.defaults[key])
        self.__dict__.setdefault("group", None)

    @torch.no_grad()
    def carry_over(self, dense: Optimizer) -> None:
        """Continue from the moments of the Adam or AdamW that trained the dense model.

        Example:
            >>> import torch, samo
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
            >>> dense = torch.optim.AdamW(model.parameters())
            >>> model(torch.ones(1, 8)).sum().backward()
            >>> dense.step()
            >>> model = samo.compress_(model, samo.prune(model, 0.5))
            >>> opt = samo.AdamW(model.parameters())
            >>> opt.carry_over(dense)
            >>> [state["exp_avg"].shape for state in opt.state.values()]
            [torch.Size([32]), torch.Size([8])]
        """
        groups = {param: group for group in self.param_groups for param in group["params"]}
        found = []
        for old, state in dense.state.items():
            weight = weight_replacing(old)
            param = old if weight is None else weight.values
            if param not in groups:
                continue
            if set(state) != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(
                    f"carry_over takes Adam or AdamW, but {type(dense).__name__} keeps "
                    f"{', '.join(sorted(state)) or 'nothing'} for {_name(param)}"
                )
            found.append((param, weight, state))
        for param, weight, given in found:
            group = groups[param]
            if not (state := self.state[param]):
                self._init_state(param, weight, group)
            state["step"].copy_(torch.as_tensor(given["step"]))
            moments = []
            for key in ("exp_avg", "exp_avg_sq"):
                moment = given[key].to(param.device, master_dtype(param.dtype))
                if weight is not None:
                    moment = weight.layout.compress(moment, moment.dtype)
                moments.append(torch.empty_like(param, dtype=moment.dtype).copy_(moment))
            if group["lean"]:
                mask = None if weight is None else weight.mask
                # Groups of 8-bit codes are neighbours in memory.
                first, second = map(_flat, moments)
                codes = quantise_weight(first, second, _numel(param, weight), mask)
                for key, code in zip(state_layout(param, weight, group), codes):
                    _flat(state[key]).copy_(code)
            else:
                state["exp_avg"], state["exp_avg_sq"] = moments
            if "age" in state:
                state["age"] = ages_at(state["step"], param.numel())


class _Batch:
    """Parameters that are updated together."""

    def __init__(self, group: dict[str, Any], device: torch.device, index: int) -> None:
        self.device: Final = device
        self.index: Final = index
        self.settings: Final = AdamWSettings(group["betas"][0], group["betas"][1], group["eps"])
        self.kernels: Final = _kernels.choose(device, group["kernels"])
        self.params: Final[list[Tensor]] = []
        self.updates: Final[list[AdamWUpdate]] = []
        self.weights: Final[list[Weight]] = []  # with a dense copy, which the update refreshes

    def update(self, skip: Tensor | None) -> None:
        self.kernels.adamw_(self.updates, self.settings, skip)
        # Autograd does not see what kernels write. It must reject a backward pass over old values.
        torch.autograd.graph.increment_version(self.params)
        copies = [weight.dense for weight in self.weights]
        torch.autograd.graph.increment_version(copies)  # type: ignore[arg-type]
        for weight in self.weights:
            weight.mark_synced()


def state_layout(
    param: Tensor, weight: Weight | None, group: dict[str, Any]
) -> dict[str, tuple[torch.dtype, Any]]:
    """Return dtype and shape of each tensor in a parameter's state, except its step count."""
    mask = None if weight is None else weight.mask
    layout: dict[str, tuple[torch.dtype, Any]]
    if group["lean"]:
        scale = (torch.float32, (num_groups(_numel(param, weight), mask),))
        layout = {
            "exp_avg": (torch.int8, param.shape),
            "exp_avg_sq": (torch.uint8, param.shape),
            "exp_avg_scale": scale,
            "exp_avg_sq_scale": scale,
        }
    else:
        moment = (master_dtype(param.dtype), param.shape)
        layout = {"exp_avg": moment, "exp_avg_sq": moment}
        if group["entry_steps"] and mask is not None:
            layout["age"] = (torch.int16, param.shape)
    remainder = remainder_dtype(param.dtype, is_lean=group["lean"])
    if remainder is not None:
        layout["correction" if group["lean"] else "remainder"] = (remainder, param.shape)
    return layout


def _local(update: AdamWUpdate) -> AdamWUpdate:
    """Return this rank's part of an update; its tensors may be empty."""
    grad, placements = update.grad, update.param.placements  # type: ignore[attr-defined]
    if isinstance(grad, DTensor) and grad.placements != placements:
        # Tensor parallelism may leave partial sums.
        update = update._replace(grad=grad.redistribute(placements=placements))
    return _update(local_of(part) if isinstance(part, Tensor) else part for part in update)


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _check_not_captured(what: str) -> None:
    if _is_captured():
        raise CompressionError(
            f"{what} is created by the first step, and each replay of this CUDA graph would reset "
            "it; call step() once before the capture"
        )


def _check_loaded(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    """Check that saved state has this parameter's dtypes, shapes and placements."""
    placements = getattr(param, "placements", None)
    expected = {
        key: (dtype, tuple(shape), placements)
        for key, (dtype, shape) in state_layout(param, weight_of(param), group).items()
    }
    found = {
        key: (value.dtype, tuple(value.shape), getattr(value, "placements", None))
        for key, value in state.items()
        if key != "step"
    }
    if found != expected:
        kind = "lean" if "exp_avg_scale" in found else "exact"
        raise MaskError(
            f"the saved optimizer state of {_name(param)} has {found}, but this optimizer needs "
            f"{expected}; build the optimizer with entry_steps={'age' in found}, state='{kind}' "
            "and the masks and dtypes of the saved run, and load sharded state with "
            "set_optimizer_state_dict of torch.distributed.checkpoint"
        )
    try:
        check_counts(state)
    except ValueError as error:
        raise MaskError(
            f"the saved optimizer state of {_name(param)} is damaged: {error}"
        ) from None


def check_counts(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a saved step count or the age of an entry is out of range."""
    step, age = finite_number("step", state.get("step", 0)), state.get("age")
    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}")
    if isinstance(age, Tensor) and bool((age < 0).any()):
        raise ValueError(f"ages must be 0 or more, got {int(age.min())}")


def _check_param(param: Tensor, group: dict[str, Any]) -> None:
    if isinstance(param, DTensor) and (group["lean"] or group["entry_steps"]):
        setting = "state='lean'" if group["lean"] else "entry_steps=True"
        raise ValueError(
            f"{_name(param)} is sharded, and {setting} is for whole parameters; leave it out, or "
            "train replicas with DistributedDataParallel"
        )
    if param.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(
            f"{_name(param)} is {param.dtype}; samo.AdamW updates float32, float64 and bfloat16, "
            "and compress_(model, masks, dtype=torch.float16) keeps float32 values"
        )
    if group["lean"] and param.dtype == torch.float64:
        raise ValueError(f"{_name(param)} is float64, which needs state='exact'")


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _numel(param: Tensor, weight: Weight | None) -> int:
    return param.numel() if weight is None else weight.shape.numel()


def _name(param: Tensor) -> str:
    weight = weight_of(param)
    return f"a parameter of {tuple(param.shape)}" if weight is None else f"'{weight.name}'"
