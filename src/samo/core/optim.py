"""`AdamW` for the parameters of a compressed model, and for any others: one fused pass, exact or lean."""

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samo import kernels as _kernels
from samo.core.shards import local_update, shard_groups
from samo.core.weight import Weight, weight_from, weight_of
from samo.errors import CompressionError, MaskError
from samo.kernels import AdamWSettings, AdamWUpdate
from samo.kernels.lean import num_groups, quantise_weight
from samo.kernels.reference import ages_at
from samo.kernels.rounding import master_dtype, remainder_dtype

__all__ = ["AdamW"]

_REMAINDER_KEYS: Final = {torch.int16: "remainder", torch.int8: "correction"}
"""Name, in the state, of what rounding left over of a bfloat16 parameter, by its type."""

_AGE: Final = "age"
"""Name of the updates that each entry has had."""

_WARN_AFTER: Final = 10
"""Skipped steps in a row that are worth a warning."""


class AdamW(Optimizer):
    """AdamW for ``model.parameters()``, in fp32 arithmetic and one fused pass over all of them.

    A step is that of torch's unfused ``torch.optim.AdamW``: bit for bit with
    ``kernels="reference"``, and within 3 units in the last place with the faster ones. It takes
    gradients of any type (``compress_(grad_dtype=torch.bfloat16)``), and refreshes the dense
    weights of a compressed model as it goes. bfloat16 parameters are updated as fp32 ones: what
    rounding leaves over is state.

    Lean state: both moments in 8 bits each, with two fp32 scales for 1,024 entries of a pruned
    weight (256 of an unpruned one), and 8 bits of what rounding leaves over: 3 bytes for each
    bfloat16 parameter instead of 10. Moments are a few percent off. The fast kernels for it are
    those of an NVIDIA GPU.

    A gradient with a NaN or an infinity anywhere makes the whole step do nothing, without waiting
    for the device; ``skipped_steps`` counts them, and many in a row are warned of.

    DTensors, such as FSDP2's ``fully_shard`` makes of parameters, are updated shard by shard with
    exact state, which is sharded as they are. Ranks that hold shards skip a step together.

    A step can be captured in a CUDA graph, after one outside of it. The graph keeps all settings as
    they were, but for a learning rate that is a tensor on the parameters' device: change it in
    place.

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
        params: Parameters, named ones, or groups of them, such as `samo.param_groups` makes.
        lr: Learning rate, a number or a scalar tensor.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        state: "exact", or "lean" for 8-bit state.
        entry_steps: Count the updates of each kept entry of pruned weights, in 2 bytes each, so
            that entries which `samo.remap_` adds late get Adam's bias correction for their own age.
        group: Ranks that skip a step together, where each has gradients that the others lack, as in
            ``ZeroRedundancyOptimizer``. Replicas of DistributedDataParallel need none: they have
            the same gradients.
        kernels: ``"auto"`` takes the fastest for the parameters' device, ``"reference"`` plain
            torch.
        fused: Taken for compatibility, as ``foreach`` and ``capturable`` are; the step is always
            fused, and can always be captured.
        foreach: As ``fused``.
        capturable: As ``fused``.
        amsgrad: Must be False, as ``maximize`` and ``differentiable``.
        maximize: As ``amsgrad``.
        differentiable: As ``amsgrad``.

    Raises:
        ValueError: A setting is out of range or not supported, or a parameter has a type that is
            not.
    """

    refreshes_dense_weights = True
    _skipped: Tensor | None = None
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
        foreach: bool | None = None,
        capturable: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        if state not in ("exact", "lean"):
            raise ValueError(f"state must be 'exact' or 'lean', got {state!r}")
        if entry_steps and state == "lean":
            raise ValueError(
                "entry_steps=True goes with state='exact' alone, got state='lean', whose updates correct "
                "all entries of a weight alike; leave out one of the two"
            )
        if kernels not in _kernels.PATHS:
            raise ValueError(f"kernels must be one of {_kernels.PATHS}, got {kernels!r}")
        for name, is_on, reason in (
            ("amsgrad", amsgrad, "it would need a third moment"),
            ("maximize", maximize, "negate the loss instead"),
            ("differentiable", differentiable, "kernels write in place"),
        ):
            if is_on:
                raise ValueError(
                    f"samo.AdamW has no {name}=True ({reason}); torch.optim.AdamW has, and takes "
                    "model.parameters() as well"
                )
        self.group = group
        self._weights: dict[Tensor, weakref.ref[Weight]] = {}
        # All of it in the groups, as torch's own settings are: copies of an optimizer have nothing
        # else.
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for example of a part of the model that was frozen so far.

        Example:
            >>> import torch, samo
            >>> first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            >>> opt = samo.AdamW(first.parameters(), lr=1e-3)
            >>> opt.add_param_group({"params": second.parameters(), "lr": 1e-4})
            >>> [group["lr"] for group in opt.param_groups]
            [0.001, 0.0001]
        """
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for index, param in enumerate(group["params"]):
            if param.requires_grad:  # frozen ones are looked at with their first gradient
                _check_type(param, group, group.get("param_names", {index: _name(param)})[index])

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was not finite; waits for the device."""
        return 0 if self._skipped is None else int(self._skipped[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients; return what ``closure`` does.

        Example:
            >>> import torch, samo
            >>> weight = torch.nn.Parameter(torch.ones(3))
            >>> weight.sum().backward()
            >>> samo.AdamW([weight], lr=0.1, weight_decay=0).step()
            >>> weight.data
            tensor([0.9000, 0.9000, 0.9000])

        Args:
            closure: Computes loss and gradients once more and returns the loss.

        Raises:
            CompressionError: A CUDA graph is captured, and a replay would do something else.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches: dict[tuple[Any, ...], _Batch] = {}
        sharded: list[DTensor] = []
        for group in self.param_groups:
            key = (*group["betas"], group["eps"], group["lean"], group["kernels"])
            batch = None
            for param in group["params"]:  # small models are bound by the host time of this loop
                is_sharded = isinstance(param, DTensor)
                if is_sharded:
                    sharded.append(param)
                grad = param.grad
                if grad is not None:
                    device = grad.device
                    if batch is None or batch.device != device:
                        batch = batches.get((*key, device))
                        if batch is None:
                            batch = batches[*key, device] = _Batch(group, device)
                    weight = None if is_sharded else self._weight_of(param)
                    batch.add(param, grad, weight, group, self._state_of(param, weight, group))
        if _is_captured():
            _check_captured(batches.values())
        groups = shard_groups(sharded)
        if not batches and not groups and self.group is None:
            return loss
        skip = self._find_nonfinite(list(batches.values()), groups)
        # A CPU's result is here already; another device's is used there, without waiting for it.
        if skip.device.type != "cpu":
            for batch in batches.values():
                batch.update(skip)
        elif not bool(skip):
            for batch in batches.values():
                batch.update(None)
        return loss

    def _weight_of(self, param: Tensor) -> Weight | None:
        """Return what `weight_of` does, from what it said before if that still holds."""
        found = self._weights.get(param)
        weight = None if found is None else found()
        if weight is None or weight.values is not param:
            weight = weight_of(param)
            if weight is not None:
                self._weights[param] = weakref.ref(weight)
        return weight

    def _find_nonfinite(
        self, batches: list["_Batch"], groups: dict[dist.ProcessGroup, str]
    ) -> Tensor:
        """Return whether any gradient is not finite on any rank that shares in the parameters.

        Counts skipped steps and warns after several in a row. Every rank calls this, with gradients
        or not.
        """
        flags = [batch.kernels.find_nonfinite(batch.gradients) for batch in batches]
        params = (param for group in self.param_groups for param in group["params"])
        device = next((param.device for param in params), torch.device("cpu"))
        flag = flags[0] if flags else torch.zeros((), dtype=torch.bool, device=device)
        for other in flags[1:]:
            flag = flag | other.to(flag.device)
        for group, device_type in groups.items():
            flag = _any_rank(flag, group, device_type)
        if self.group is not None:
            flag = _any_rank(flag, self.group, flag.device.type)
        if self._skipped is None:
            _check_is_not_first("the count of skipped steps")
            self._skipped = torch.zeros(2, dtype=torch.int64, device=flag.device)
        total, in_a_row = self._skipped
        total.add_(flag)
        in_a_row.add_(1).mul_(flag)
        self._warn_of_skips()
        return flag

    def _warn_of_skips(self) -> None:
        """Look at the count that was sent some steps ago, and send it again."""
        assert self._skipped is not None
        if self._skipped_on_host is None:
            pinned = self._skipped.is_cuda
            self._skipped_on_host = torch.zeros(
                2, dtype=torch.int64, device="cpu", pin_memory=pinned
            )
        total, in_a_row = self._skipped_on_host.tolist()
        if in_a_row and in_a_row % _WARN_AFTER == 0:
            warnings.warn(
                f"{in_a_row} steps in a row were skipped ({total} in all): a gradient is NaN or infinite, "
                "and nothing is learnt; look for it with torch.autograd.set_detect_anomaly(True), or "
                "lower the loss scale",
                stacklevel=4,
            )
        self._skipped_on_host.copy_(self._skipped, non_blocking=True)

    def _state_of(
        self, param: Tensor, weight: Weight | None, group: dict[str, Any]
    ) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            _check_is_not_first(f"the state of {_name(param)}")
            _check_type(param, group, _name(param))
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for key, (dtype, shape) in _layout(param, weight, group).items():
                if shape == param.shape:  # and of its strides
                    state[key] = torch.zeros_like(param, dtype=dtype)
                else:
                    state[key] = torch.zeros(shape, dtype=dtype, device=param.device)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, before or after the model takes over its own.

        Example:
            >>> import torch, samo
            >>> opt = samo.AdamW(torch.nn.Linear(8, 8).parameters())
            >>> opt.load_state_dict(opt.state_dict())

        Raises:
            ValueError: The groups do not match.
            MaskError: The state belongs to other masks, or to parameters of another type.
        """
        saved = state_dict["state"]
        own, others = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in own] == [len(group["params"]) for group in others]:
            # By numbers, or by the names that torch.distributed.checkpoint puts in their place.
            keys = [key for group in others for key in group["params"]]
            pairs = [(param, group) for group in own for param in group["params"]]
            found = [(saved[key], *pair) for key, pair in zip(keys, pairs) if key in saved]
        else:
            found = []  # torch refuses
        for state, param, group in found:
            _check_loaded(param, group, state)
        super().load_state_dict({**state_dict, "state": {}})  # torch would cast 8-bit state
        for state, param, _ in found:
            self.state[param] = {
                key: value.to(param.device, copy=True) for key, value in state.items()
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a copy or `load_state_dict` brings; groups keep their kind of state."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key in ("lean", "entry_steps", "kernels"):
                group.setdefault(key, self.defaults[key])
        self.__dict__.setdefault("group", None)
        self._weights = {}

    @torch.no_grad()
    def carry_over(self, dense: Optimizer) -> None:
        """Continue from the moments of the optimizer that trained the model before compression.

        Without this the first steps after pruning divide by moments that know one gradient each.

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

        Args:
            dense: An Adam or AdamW of torch over the parameters that the model had.

        Raises:
            ValueError: It keeps other state than Adam's.
        """
        groups = {param: group for group in self.param_groups for param in group["params"]}
        found: list[tuple[Tensor, Weight | None, dict[str, Any]]] = []
        for old, state in dense.state.items():
            weight = weight_from(old)
            param = old if weight is None else weight.values
            if param not in groups:
                continue
            if set(state) != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(
                    f"carry_over takes the state of Adam or AdamW, but for {_name(param)} "
                    f"{type(dense).__name__} keeps {', '.join(sorted(state)) or 'nothing'}; leave it "
                    "out, and the moments start at 0"
                )
            found.append((param, weight, state))
        for param, weight, given in found:
            group = groups[param]
            state = self._state_of(param, weight, group)
            state["step"].copy_(torch.as_tensor(given["step"]))
            moments = []
            for key in ("exp_avg", "exp_avg_sq"):
                moment = given[key].to(param.device, master_dtype(param.dtype))
                if weight is not None:
                    moment = weight.layout.compress(moment, moment.dtype)
                moments.append(torch.empty_like(param, dtype=moment.dtype).copy_(moment))
            if group["lean"]:
                mask = None if weight is None else weight.mask
                # Groups of entries are neighbours in memory.
                first, second = map(_flat, moments)
                codes = quantise_weight(first, second, _numel(param, weight), mask)
                for key, code in zip(_layout(param, weight, group), codes):
                    _flat(state[key]).copy_(code)
            else:
                state["exp_avg"], state["exp_avg_sq"] = moments
            if _AGE in state:
                state[_AGE] = ages_at(state["step"], param.numel())


def _is_captured() -> bool:
    """Return whether what is launched becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _check_is_not_first(what: str) -> None:
    """Refuse to make state while a graph is captured."""
    if _is_captured():
        raise CompressionError(
            f"{what} is made by the first step, which is being captured in a CUDA graph: each replay would "
            "set it to 0; call step() once before you capture it"
        )


def _check_captured(batches: Iterable["_Batch"]) -> None:
    """Refuse what a graph would leave out, or cannot do."""
    for batch in batches:
        if batch.device.type != "cuda":
            raise CompressionError(
                f"{_name(batch.params[0])} is on the {batch.device.type}, and a CUDA graph would leave it "
                "as it is; give it to an optimizer of its own, whose step is not captured"
            )
        if batch.path == "reference":
            raise CompressionError(
                "kernels='reference' asks the host where kept weights lie, which a CUDA graph cannot do; "
                "leave it out to capture samo.AdamW.step"
            )


def _any_rank(flag: Tensor, group: dist.ProcessGroup, device_type: str) -> Tensor:
    """Return whether a flag is set on any rank of a group that talks between devices of a type."""
    there = flag if flag.device.type == device_type else flag.to(device_type)
    shared = there.to(torch.int32)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return shared.to(flag.device, torch.bool)


class _Batch:
    """Parameters that are updated together."""

    def __init__(self, group: dict[str, Any], device: torch.device) -> None:
        self.settings = AdamWSettings(group["betas"][0], group["betas"][1], group["eps"])
        self.device, self.path, self.is_lean = device, group["kernels"], group["lean"]
        self.kernels = _kernels.choose(device, self.path)
        self.params: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.weights: list[Weight] = []
        self.updates: list[AdamWUpdate] = []

    def add(
        self,
        param: Tensor,
        grad: Tensor,
        weight: Weight | None,
        group: dict[str, Any],
        state: dict[str, Any],
    ) -> None:
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        dense, mask = None, None
        if weight is not None:
            if weight.may_be_written():
                weight.sync_written()
            dense, mask = weight.dense, weight.layout.mask
            if dense is not None:
                self.weights.append(weight)
        is_lean = self.is_lean
        update = AdamWUpdate(
            param,
            state.get("correction" if is_lean else "remainder"),
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"],
            group["lr"],
            group["weight_decay"],
            dense,
            mask,
            state.get(_AGE) if group["entry_steps"] else None,
            state["exp_avg_scale"] if is_lean else None,
            state["exp_avg_sq_scale"] if is_lean else None,
        )
        if isinstance(param, DTensor):
            update = local_update(update)
        self.params.append(param)
        self.gradients.append(update.grad)
        self.updates.append(update)

    def update(self, skip: Tensor | None) -> None:
        self.kernels.adamw_(self.updates, self.settings, skip)
        # Kernels write behind autograd's back, and a backward pass over older values must be
        # refused.
        torch.autograd.graph.increment_version(self.params)
        torch.autograd.graph.increment_version([weight.dense for weight in self.weights])  # type: ignore[misc]
        for weight in self.weights:
            weight.note()


def _layout(
    param: Tensor, weight: Weight | None, group: dict[str, Any]
) -> dict[str, tuple[torch.dtype, Any]]:
    """Return type and shape of what is kept for a parameter beside its step count."""
    layout: dict[str, tuple[torch.dtype, Any]]
    mask = None if weight is None else weight.mask
    if not group["lean"]:
        moment = (master_dtype(param.dtype), param.shape)
        layout = {"exp_avg": moment, "exp_avg_sq": moment}
        if group["entry_steps"] and mask is not None:
            layout[_AGE] = (torch.int16, param.shape)
    else:
        scale = (torch.float32, (num_groups(_numel(param, weight), mask),))
        layout = {
            "exp_avg": (torch.int8, param.shape),
            "exp_avg_sq": (torch.uint8, param.shape),
            "exp_avg_scale": scale,
            "exp_avg_sq_scale": scale,
        }
    remainder = remainder_dtype(param.dtype, is_lean=group["lean"])
    if remainder is not None:
        layout[_REMAINDER_KEYS[remainder]] = (remainder, param.shape)
    return layout


def _check_loaded(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    """Refuse a saved state that is not of this parameter's types and sizes."""
    weight = weight_of(param)
    found = {
        key: (value.dtype, tuple(value.shape)) for key, value in state.items() if key != "step"
    }
    is_lean = "exp_avg_scale" in found
    if is_lean != group["lean"]:
        kinds = ("exact", "lean")
        raise MaskError(
            f"the saved optimizer state of {_name(param)} is {kinds[is_lean]}, and this optimizer "
            f"keeps {kinds[group['lean']]} state; build it with state='{kinds[is_lean]}'"
        )
    layout = _layout(param, weight, group)
    if (_AGE in found) != (_AGE in layout):
        raise MaskError(
            f"the saved optimizer state of {_name(param)} has {'' if _AGE in found else 'no '}step "
            f"counts of its entries; build the optimizer with entry_steps={_AGE in found}"
        )
    for key in layout.keys() & found.keys():
        placed = [getattr(tensor, "placements", None) for tensor in (param, state[key])]
        if placed[0] != placed[1]:
            raise MaskError(
                f"the saved '{key}' of {_name(param)} is placed as {placed[1]} and the parameter as "
                f"{placed[0]}, where None is a whole tensor; load it with set_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict, which cuts state as the parameters are"
            )
    expected = {key: (dtype, tuple(shape)) for key, (dtype, shape) in layout.items()}
    if found != expected:
        raise MaskError(
            f"the saved optimizer state of {_name(param)} holds {found}, but the parameter needs "
            f"{expected}; it belongs to another mask or another type: load it into a model compressed "
            "with the masks and types that it was trained with"
        )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _numel(param: Tensor, weight: Weight | None) -> int:
    return param.numel() if weight is None else weight.shape.numel()


def _name(param: Tensor) -> str:
    weight = weight_of(param)
    return f"a parameter of {tuple(param.shape)}" if weight is None else f"'{weight.name}'"


def _check_type(param: Tensor, group: dict[str, Any], name: str) -> None:
    if isinstance(param, DTensor) and (group["lean"] or group["entry_steps"]):
        setting = "state='lean'" if group["lean"] else "entry_steps=True"
        raise ValueError(
            f"{name} is sharded as {param.placements}, and {setting} is for whole parameters: it goes "
            "by places in a mask, which shards do not know; leave it out, or train replicas with "
            "DistributedDataParallel"
        )
    if param.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(
            f"{name} is {param.dtype}; samo.AdamW updates float32, float64 and bfloat16 "
            "parameters, and compress_(model, masks, dtype=torch.float16) keeps float32 ones"
        )
    if group["lean"] and param.dtype == torch.float64:
        raise ValueError(
            f"{name} is float64, which lean state has too few digits for; pass "
            "state='exact', or compress the model with dtype=torch.float32"
        )


def _check_settings(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if not isinstance(value, Tensor) and not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
