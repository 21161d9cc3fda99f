"""The state of any torch optimizer by parameter name, as JSON that refers to tensors.

class      "samo.AdamW"
groups     [{"names": ["0.weight"], "settings": {"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}}}]
state      {"0.weight": {"step": {"$tensor": "0.weight/step"}, ...}}
more       what else its state_dict() has, {} in most

Groups are matched by the names in them, not by their order: every group takes the settings that its
parameters had.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from samo.checkpoint import json_values
from samo.checkpoint.manifest import damaged
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.reader import Checkpoint
from samo.checkpoint.tensors import name_tensors, rows_of
from samo.core.adamw import AdamW, check_counts, state_layout
from samo.core.shards import local_of
from samo.core.step_hooks import SHAPED
from samo.errors import CheckpointError
from samo.utils.safetensors_io import DTYPE_NAMES, DTYPES
from samo.utils.validation import finite_number


class OptimizerState:
    """What of an optimizer is saved and loaded."""

    def __init__(self, opt: Optimizer, model: ModelState) -> None:
        if not isinstance(opt, Optimizer):
            raise TypeError(
                f"opt must be one optimizer, got {type(opt).__name__}; put the state_dict() of "
                "others into extra="
            )
        self.opt: Final = opt
        # The optimizer, or the one that it shards over ranks, as ZeroRedundancyOptimizer does.
        self.kind: Final[Optimizer] = getattr(opt, "optim", opt)
        self.model: Final = model
        self.groups: Final[list[tuple[dict[str, Any], dict[str, Tensor]]]] = []
        known = {id(entry.tensor): name for name, entry in model.entries.items()}
        for i, group in enumerate(opt.param_groups):
            for param in group["params"]:
                if id(param) not in known:
                    raise CheckpointError(
                        f"the optimizer has a parameter of shape {tuple(param.shape)} in group {i} "
                        "that the model lacks; build it on model.parameters(), after samo.compress_"
                    )
            self.groups.append((group, {known[id(param)]: param for param in group["params"]}))

    def describe(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the optimizer's entry of this stage, and add the tensors that it refers to."""
        packed = self.opt.state_dict()
        groups = [
            {"names": [*params], "settings": json_values.encode(_settings(group), "group", _inline)}
            for group, params in self.groups
            if params
        ]
        more = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
        names = [name for _, params in self.groups for name in params]
        own = self.model.tensors
        state = {}
        for index, content in packed["state"].items():
            if index not in range(len(names)):
                raise CheckpointError(
                    f"{_class_name(self.opt)} has state of {index!r}, not a parameter; use opt=None"
                )
            if (name := names[index]) in own:
                state[name] = json_values.encode(content, name, name_tensors(tensors))
        return {
            "class": _class_name(self.kind),
            "groups": groups,
            "more": json_values.encode(more, "state_dict", _inline),
            "state": state,
        }

    def check_fits(self, saved: Checkpoint) -> None:
        """Refuse the state of another optimizer, before anything is changed."""
        entry = saved.manifest.optimizer
        if entry is None:
            raise saved.misfit("it was saved without an optimizer; load it with opt=None")
        if entry["class"] != _class_name(self.kind):
            raise saved.misfit(
                f"it has the state of a {entry['class']}, not of a {_class_name(self.kind)}; build "
                "that optimizer, or load with opt=None"
            )
        theirs, states = _settings_by_name(entry), entry["state"]
        saved.check_names(saved.optimizer, list(states.values()), "optimizer state")
        if not states.keys() <= theirs.keys():
            raise damaged(saved.path, "it has optimizer state without settings")
        try:
            json_values.decode(entry["more"], _from_inline)
            for group in entry["groups"]:
                self._check_settings(_numbers(group["settings"]))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(saved.path, f"its settings are not valid ({error})") from None
        own = {name for _, params in self.groups for name in params}
        is_part, entries = self.model.layout.is_part, self.model.entries
        for name in sorted(own ^ {name for name in theirs if not is_part or name in entries}):
            side = "optimizer" if name in own else "checkpoint"
            raise saved.misfit(
                f"'{name}' is only in the {side}; build the optimizer on the same parameters"
            )
        for group, params in self.groups:
            first = next(iter(params), "")
            for name in params:
                one, other = theirs[first], theirs[name]
                if one != other:
                    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
                    raise saved.misfit(
                        f"'{first}' and '{name}' are in one group but were saved with "
                        f"{key}={one.get(key)} and {other.get(key)}; build the same groups"
                    )
                if states.get(name):
                    content = json_values.decode(states[name])
                    self._check_state(saved, name, content, group, _numbers(other))

    def _check_settings(self, settings: dict[str, Any]) -> None:
        """Raise unless settings are of the same kind as the defaults, and allowed by the class."""
        defaults = self.kind.defaults
        for key, value in settings.items():
            _check_kind(key, value, defaults.get("lr" if key == "initial_lr" else key))
        if type(self.kind).__module__.startswith(("samo.", "torch.optim.")):
            self._build(torch.zeros(1), settings)

    def _build(self, param: Tensor, settings: dict[str, Any]) -> Optimizer:
        cls = type(self.kind)
        known = signature(cls).parameters
        return cls([param], **{key: settings[key] for key in settings if key in known})

    def _check_state(
        self,
        saved: Checkpoint,
        name: str,
        content: dict[str, Any],
        group: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:
        param, weight = self.model.entries[name]
        specs = saved.optimizer.specs
        held = {  # types and shapes of tensors, None for what is not one
            key: specs[value][:2] if isinstance(value, json_values.TensorName) else None
            for key, value in content.items()
        }
        hint = ""
        if isinstance(self.kind, AdamW):
            layout = state_layout(param, weight, group)
            expected: dict[str, Any] = {k: (dtype, tuple(s)) for k, (dtype, s) in layout.items()}
            expected["step"] = (torch.float32, ())
            kinds = {key: settings.get(key, group[key]) for key in ("lean", "entry_steps")}
            is_same = all(kinds[key] == group[key] for key in kinds)
            state = "lean" if kinds["lean"] else "exact"
            hint = f"; build samo.AdamW with {state=} and entry_steps={kinds['entry_steps']}"
        else:
            expected, is_same = held | self._torch_layout(param, settings, held), True
        if held != expected or not is_same:
            raise saved.misfit(
                f"its optimizer state of '{name}' is {held} instead of {expected}{hint}"
            )
        counts: dict[str, Any] = {k: content[k] for k in ("step", "age") if k in content}
        for key, value in counts.items():
            if isinstance(value, json_values.TensorName):
                counts[key] = saved.optimizer.read(value)
        try:
            check_counts(counts)
        except ValueError as error:
            raise damaged(saved.path, f"optimizer state of '{name}': {error}") from None

    def _torch_layout(
        self, param: Tensor, settings: dict[str, Any], held: dict[str, Any]
    ) -> dict[str, Any]:
        """Return types and shapes of the state that a step gives a parameter, by making one.

        On the meta device, without memory. Of an optimizer that cannot step there, or is not
        torch's, what is usual.
        """
        shape = tuple(param.shape)
        usual = {key: (spec[0], shape) for key, spec in held.items() if key in SHAPED and spec}
        if not type(self.kind).__module__.startswith("torch.optim."):
            return usual
        probe = torch.empty(shape, dtype=param.dtype, device="meta", requires_grad=True)
        probe.grad_dtype = param.grad_dtype
        probe.grad = torch.empty(shape, dtype=param.grad_dtype, device="meta")
        plain = dict.fromkeys(("fused", "foreach", "capturable"), False)
        try:
            opt = self._build(probe, settings | {k: v for k, v in plain.items() if k in settings})
            opt.step()
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return usual
        return {
            key: (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else None
            for key, value in opt.state[probe].items()
        }

    def fill(self, saved: Checkpoint, undo: ExitStack) -> None:
        """Load a state that fits with torch's own method, which knows defaults of new settings.

        ``undo`` restores the old state.
        """
        entry = saved.manifest.optimizer
        assert entry is not None, "check_fits has refused it"
        for opt in {self.kind, self.opt}:
            # Tensors need no copies: loading replaces them. It may change the dicts, though.
            before = {key: copy(value) for key, value in opt.state.items()}
            undo.callback(_restore, opt, dict(vars(opt)), before, [*map(copy, opt.param_groups)])

        def read(like: Tensor, name: str) -> Tensor:
            spec = saved.optimizer.specs[name]
            if spec.shape != tuple(like.shape):
                return saved.optimizer.read(name).to(like.device, copy=True)
            # With the parameter's shards, and its strides, on which torch's fused kernels rely.
            found = torch.empty_like(like, dtype=spec.dtype, requires_grad=False)
            local_of(found).copy_(saved.optimizer.read(name, rows_of(like)))
            return found

        theirs = _settings_by_name(entry)
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        all_params: list[Tensor] = []
        for group, params in self.groups:
            start, settings, on_device = len(all_params), _settings(group), False
            for name, param in [*params.items()][:1]:  # all of a group have the same settings
                on_device = bool(theirs[name].get("capturable") or theirs[name].get("fused"))
                to = partial(_from_inline, device=param.device if on_device else None)
                settings |= json_values.decode(theirs[name], to)  # older ones may lack a setting
            # torch reads step counts on the host, except for capturable and fused.
            is_host = not on_device and not isinstance(self.kind, AdamW)
            for name, param in params.items():
                if name in entry["state"]:
                    content = json_values.decode(entry["state"][name], partial(read, param))
                    if is_host and isinstance(content.get("step"), Tensor):
                        content["step"] = content["step"].cpu()
                    state[len(all_params)] = content
                all_params.append(param)
                self.model.layout.ranks.note_progress()
            groups.append({**settings, "params": [*range(start, len(all_params))]})
        more = json_values.decode(entry["more"], _from_inline)
        packed = {**more, "state": state, "param_groups": groups}
        if self.kind is not self.opt:
            self.opt.load_state_dict(packed)  # which gives each rank its part
            return
        self.opt.load_state_dict({**packed, "state": {}})
        for index, content in state.items():  # torch would cast it to the parameters' type
            self.opt.state[all_params[index]] = content


def _restore(
    opt: Optimizer, attributes: dict[str, Any], state: dict[Any, Any], groups: list[dict[str, Any]]
) -> None:
    vars(opt).clear()
    vars(opt).update(attributes)
    opt.state.clear()
    opt.state.update(state)
    for group, old in zip(opt.param_groups, groups):
        group.clear()
        group.update(old)


def _check_kind(key: str, value: Any, like: Any) -> None:
    """Raise ValueError unless a setting is of the same kind as another, and finite if that is."""
    if isinstance(like, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(like):
            raise ValueError(f"{key} must be {len(like)} values, got {value!r}")
        for item, other in zip(value, like):
            _check_kind(key, item, other)
    elif isinstance(like, bool | str):
        if value is not None and type(value) is not type(like):
            raise ValueError(f"{key} must be a {type(like).__name__}, got {value!r}")
    elif isinstance(like, int | float) or (isinstance(like, Tensor) and like.numel() == 1):
        finite_number(key, value)


def _inline(value: Any, where: str) -> list[Any] | None:
    """Encode a tensor among settings, such as a learning rate, in the manifest itself."""
    return [DTYPE_NAMES[value.dtype], value.tolist()] if isinstance(value, Tensor) else None


def _from_inline(value: list[Any], device: torch.device | None = None) -> Tensor:
    dtype, items = value
    return torch.tensor(items, dtype=DTYPES[dtype], device=device)


def _numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """Return encoded settings, with tensors as numbers."""
    found: dict[str, Any] = json_values.decode(settings, lambda v: _from_inline(v).tolist())
    return found


def _settings_by_name(entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: group["settings"] for group in entry["groups"] for name in group["names"]}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _class_name(opt: Optimizer) -> str:
    cls = type(opt)
    package = next((p for p in ("samo", "torch.optim") if cls.__module__.startswith(f"{p}.")), "")
    return f"{package or cls.__module__}.{cls.__qualname__}"
