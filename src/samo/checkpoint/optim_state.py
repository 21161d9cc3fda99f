"""The state of any torch optimizer by parameter name, as JSON that refers to tensors.

class      "samo.AdamW"
groups     [{"names": ["0.weight"], "settings": {"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}}}]
state      {"0.weight": {"step": {"$tensor": "0.weight/step"}, ...}}
more       what else its state_dict() has, {} in most

Groups are matched by the names in them, not by their order: every group takes the settings that its
parameters had.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from samo.checkpoint import json_values
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.tensors import SETTING, Checkpoint, check_plain, is_dtensor, rows_of, with_rows
from samo.core.optim import AdamW, state_layout
from samo.errors import CheckpointError
from samo.utils.safetensors_io import host_bytes

__all__ = []

_SHAPED: Final = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
)
"""State with an entry for each of the parameter's, whose size fused kernels do not check."""


class OptimizerState:
    """What of an optimizer is saved and loaded.

    Raises:
        CheckpointError: It has a parameter that the model does not.
    """

    def __init__(self, opt: Optimizer, model: ModelState) -> None:
        self.opt: Final = opt
        # The optimizer, or the one that it shards over ranks, as ZeroRedundancyOptimizer does.
        self.kind: Final[Optimizer] = getattr(opt, "optim", opt)
        self.model: Final = model
        self.names: Final[list[list[str]]] = []
        self.params: Final[dict[str, tuple[Tensor, dict[str, Any]]]] = {}
        known = {id(entry.tensor): name for name, entry in model.entries.items()}
        for i, group in enumerate(opt.param_groups):
            for param in group["params"]:
                if id(param) not in known:
                    raise CheckpointError(
                        f"group {i} of the optimizer has a tensor of shape {tuple(param.shape)} that is "
                        "not a parameter of this model; build it on model.parameters(), after "
                        "samo.compress_"
                    )
            self.names.append([known[id(param)] for param in group["params"]])
            self.params.update(
                (name, (param, group)) for name, param in zip(self.names[-1], group["params"])
            )

    def describe(self, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the optimizer's entry of this stage, and add the tensors that it refers to."""

        def by_place(value: Tensor, where: str) -> str:
            while where in tensors:  # "a/b" of parameter "c" and "b" of parameter "c/a"
                where += "_"
            return where

        def by_content(value: Tensor, where: str) -> str:
            digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
            digest.update(host_bytes(value).numpy().tobytes())
            return f"{SETTING}{digest.hexdigest()[:16]}"

        def encode(
            content: dict[str, Any], where: str, new_name: Callable[[Tensor, str], str] = by_place
        ) -> Any:
            def name_tensor(value: Any, where: str) -> str | None:
                if not isinstance(value, Tensor):
                    return None
                check_plain(where, value)
                name = new_name(value, where)
                tensors[name] = value
                return name

            return json_values.encode(
                content, prefix + where, name_tensor=name_tensor, keep_tuples=True
            )

        packed = self.opt.state_dict()
        groups = [
            {"names": names, "settings": encode(_settings(group), f"group {i}", by_content)}
            for i, (names, group) in enumerate(zip(self.names, self.opt.param_groups))
            if names
        ]
        more = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
        flat = [name for names in self.names for name in names]
        own = self.model.tensors
        state = {}
        for index, content in packed["state"].items():
            if index not in range(len(flat)):
                raise CheckpointError(
                    f"{_class_name(self.opt)} keeps state that belongs to none of its parameters "
                    f"({index!r}); leave out opt, and save that state in extra="
                )
            if flat[index] in own:
                state[flat[index]] = encode(content, flat[index])
        return {
            "class": _class_name(self.kind),
            "groups": groups,
            "more": encode(more, "all", by_content),
            "state": state,
        }

    # Loading -------------------------------------------------------------------------------------

    def check_fits(self, saved: Checkpoint, entry: dict[str, Any]) -> None:
        """Refuse the state of another optimizer, before anything is changed.

        Raises:
            CheckpointError: Its class, its groups or its names differ.
        """
        if entry["class"] != _class_name(self.kind):
            raise CheckpointError(
                f"'{saved.path}' has the state of a {entry['class']}, not of a {_class_name(self.kind)}; "
                "build the optimizer it was saved with, or load with opt=None"
            )
        theirs = _settings_by_name(entry)
        for name in sorted(self.params.keys() ^ {name for name in theirs if self._is_own(name)}):
            side = "optimizer" if name in self.params else "checkpoint"
            raise saved.misfit(
                f"'{name}' is in the {side} alone; build the optimizer on the same parameters as when it "
                "was saved"
            )
        for names in self.names:
            for name in names:
                one, other = theirs[names[0]], theirs[name]
                if one != other:
                    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
                    raise saved.misfit(
                        f"'{names[0]}' and '{name}' are in one group of the optimizer, and were saved with "
                        f"{key}={one.get(key)} and {other.get(key)}; build the groups as when they were "
                        "saved"
                    )
        for name, content in entry["state"].items():
            if self._is_own(name):
                self._check_state(saved, name, content)

    def _check_state(self, saved: Checkpoint, name: str, content: dict[str, Any]) -> None:
        if name not in self.params:
            raise CheckpointError(
                f"'{saved.path}' is damaged: it has optimizer state of '{name}', which is in none of its "
                "groups; take another copy of the checkpoint"
            )
        param, group = self.params[name]
        shape = (saved.masks[name].kept,) if name in saved.masks else tuple(param.shape)
        held = {}  # shapes and types of tensors, None for what is not one
        for key, value in content.items():
            is_tensor = isinstance(value, dict) and set(value) == {"$tensor"}
            held[key] = saved.moments.specs[value["$tensor"]][:2] if is_tensor else None
        for key, found in held.items():
            if key in _SHAPED and found is not None and found[1] != shape:
                raise _misfit(saved, name, key, found[1])
        if not isinstance(self.kind, AdamW) or not content:
            return
        is_lean, has_ages = "exp_avg_scale" in held, "age" in held
        if is_lean != group["lean"]:
            kinds = ("exact", "lean")
            raise CheckpointError(
                f"'{saved.path}' has {kinds[is_lean]} optimizer state and this optimizer keeps "
                f"{kinds[group['lean']]} state; build samo.AdamW with state='{kinds[is_lean]}'"
            )
        layout = state_layout(param, self.model.entries[name].weight, group)
        if has_ages != ("age" in layout):
            raise CheckpointError(
                f"'{saved.path}' has {'' if has_ages else 'no '}step counts of the entries of '{name}'; "
                f"build samo.AdamW with entry_steps={has_ages}"
            )
        expected = {
            key: (dtype, tuple(size) if key.endswith("_scale") else shape)
            for key, (dtype, size) in layout.items()
        }
        if held != {"step": (torch.float32, ()), **expected}:
            raise _misfit(saved, name, "state", held)

    def fill(self, saved: Checkpoint, entry: dict[str, Any]) -> None:
        """Load a state that fits, by torch's own way, which knows the defaults of newer settings."""
        host, specs = torch.device("cpu"), saved.moments.specs

        def decode(value: Any, device: torch.device, like: Tensor | None = None) -> Any:
            def read(name: str) -> Tensor:
                if like is not None and is_dtensor(like) and specs[name].shape == like.shape:
                    return with_rows(saved.moments.read(name, rows_of(like)), like)
                return saved.moments.read(name).to(device, copy=True)

            return json_values.decode(value, read)

        by_name = _settings_by_name(entry)
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        params: list[Tensor] = []
        for names, group in zip(self.names, self.opt.param_groups):
            settings = by_name[names[0]] if names else {}
            on_device = bool(settings.get("capturable") or settings.get("fused"))
            device = group["params"][0].device if on_device else host
            new = decode(settings, device) if names else _settings(group)
            groups.append({**new, "params": [len(params) + i for i in range(len(names))]})
            for name, param in zip(names, group["params"]):
                if name in entry["state"]:
                    content = state[len(params)] = {}
                    for key, value in entry["state"][name].items():
                        # torch reads step counts on the host, except for capturable and fused
                        # kernels.
                        is_host = key == "step" and not (on_device or isinstance(self.kind, AdamW))
                        content |= decode({key: value}, host if is_host else param.device, param)
                params.append(param)
                self.model.layout.ranks.note_progress()
        packed = {**decode(entry["more"], host), "state": state, "param_groups": groups}
        if self.kind is not self.opt:
            self.opt.load_state_dict(packed)  # which gives each rank its part
            return
        self.opt.load_state_dict({**packed, "state": {}})
        for index, content in state.items():  # torch would cast it to the parameters' type
            self.opt.state[params[index]] = content

    def _is_own(self, name: str) -> bool:
        """Return whether a name of the checkpoint is not another stage's."""
        return not self.model.layout.is_part or name in self.model.entries


def check_all(saved: Checkpoint, optimizers: Sequence[OptimizerState]) -> None:
    """Refuse the states of other optimizers, before anything is changed.

    Raises:
        CheckpointError: There are none, others, or more or less.
    """
    entries = saved.manifest.optimizers
    if not entries:
        raise CheckpointError(
            f"'{saved.path}' was saved without an optimizer; load it with opt=None, or save with opt"
        )
    if len(entries) != len(optimizers):
        kinds = ", ".join(entry["class"] for entry in entries)
        raise CheckpointError(
            f"'{saved.path}' has the state of {len(entries)} optimizers ({kinds}) and samo.load was given "
            f"{len(optimizers)}; give all of them, in that order, or load with opt=None"
        )
    shared = [[entry["more"], *_settings_by_name(entry).values()] for entry in entries]
    held = json_values.references([list(entry["state"].values()) for entry in entries])
    named = {*held, *json_values.references(shared)}
    # What an optimizer has beside its groups is that of the first stage; other stages wrote theirs
    # too.
    found = {n for n in saved.moments.specs if n in named or not n.startswith(SETTING)}
    if named != found or len(held) != len(set(held)):
        raise CheckpointError(
            f"'{saved.path}' is damaged: its optimizer state names {len(named):,} tensors, which are not "
            f"the {len(found):,} that are there; take another copy of the checkpoint"
        )
    for optimizer, entry in zip(optimizers, entries):
        optimizer.check_fits(saved, entry)


def _misfit(saved: Checkpoint, name: str, key: str, found: object) -> CheckpointError:
    return saved.misfit(
        f"the optimizer's {key} of '{name}' is {found}, which is not that of this parameter; load it into "
        "the model it was saved from"
    )


def _settings_by_name(entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: group["settings"] for group in entry["groups"] for name in group["names"]}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _class_name(opt: Optimizer) -> str:
    cls = type(opt)
    for package in ("samo", "torch.optim"):
        if cls.__module__.startswith(f"{package}."):
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"
