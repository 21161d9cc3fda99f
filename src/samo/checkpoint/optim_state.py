"""The state of any torch optimizer by parameter name, as JSON that refers to tensors.

class      "samo.AdamW"
groups     [{"names": ["0.weight"], "settings": {"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}}}]
state      {"0.weight": {"step": {"$tensor": "0.weight/step"}, ...}}
more       what else its state_dict() has, {} in most

Groups are matched by the names in them, not by their order: every group takes the settings that its
parameters had.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from samo.checkpoint import values
from samo.checkpoint.manifest import Manifest
from samo.checkpoint.merging import references_of, settings_key
from samo.checkpoint.model_state import ModelState
from samo.checkpoint.rows import cut_as, pieces_of
from samo.checkpoint.tensors import Shards, Source, Spec, host_bytes, source_of
from samo.core.optim import AdamW, _layout
from samo.errors import CheckpointError
from samo.mask.mask import Mask

__all__ = []

_SHAPED: Final = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "sum",
}
"""State that has an entry for each of the parameter's, which fused kernels rely on unseen."""


class OptimizerState:
    """What of an optimizer is saved and loaded."""

    def __init__(self, opt: Optimizer, model: ModelState) -> None:
        self.opt: Final = opt
        # The optimizer, or the one that it shards over ranks, as ZeroRedundancyOptimizer does.
        self.kind: Final[Optimizer] = getattr(opt, "optim", opt)
        self.model: Final = model
        self.names: Final = _names(opt, model)

    def describe(self, prefix: str, tensors: dict[str, Source]) -> dict[str, Any]:
        """Return the optimizer's entry in a stage's share, and add the tensors it refers to."""

        def by_place(value: Any, where: str) -> str | None:
            if not isinstance(value, Tensor):
                return None
            name = where
            while name in tensors:  # "a/b" of parameter "c" and "b" of parameter "c/a"
                name += "_"
            tensors[name] = source_of(name, value)
            return name

        def by_content(value: Any, where: str) -> str | None:
            if not isinstance(value, Tensor):
                return None
            source = source_of(where, value)
            digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
            digest.update(host_bytes(value).numpy().tobytes())
            name = f"setting {digest.hexdigest()[:16]}"
            tensors[name] = source
            return name

        def encode(content: dict[str, Any], where: str, name: values.NameTensor = by_place) -> Any:
            return values.encode(content, prefix + where, name_tensor=name, keep_tuples=True)

        packed = self.opt.state_dict()
        groups = [
            {
                "names": [self.names[id(param)] for param in group["params"]],
                "settings": encode(_settings(group), f"group {i}", by_content),
            }
            for i, group in enumerate(self.opt.param_groups)
        ]
        rest = {key: value for key, value in packed.items() if key not in _PACKED}
        more = encode(rest, "all", by_content)
        names = dict(enumerate(name for group in groups for name in group["names"]))
        if foreign := [key for key in packed["state"] if key not in names]:
            raise CheckpointError(
                f"{_class_name(self.opt)} keeps state that belongs to none of its parameters "
                f"({foreign[0]!r}); leave out opt, and save that state in extra="
            )
        state = {
            names[index]: encode(content, names[index])
            for index, content in packed["state"].items()
        }
        return {"class": _class_name(self.kind), "groups": groups, "more": more, "state": state}

    # Loading -------------------------------------------------------------------------------------

    def tensors_of(self, entry: dict[str, Any]) -> list[str]:
        """Return the names of the tensors of a saved optimizer that this one takes."""
        own = {name: state for name, state in entry["state"].items() if self._is_own(name)}
        return references_of({**entry, "state": own})

    def check_fits(
        self, path: str, entry: dict[str, Any], masks: Mapping[str, Mask], saved: Shards
    ) -> None:
        """Refuse a state of another optimizer, before anything is changed.

        Raises:
            CheckpointError: Its class, its groups or its names differ.
        """
        if entry["class"] != _class_name(self.kind):
            raise CheckpointError(
                f"'{path}' has the state of a {entry['class']}, not of a {_class_name(self.kind)}; build "
                "the optimizer it was saved with, or load with opt=None"
            )
        self._check_groups(path, entry["groups"])
        self._check_tensors(path, entry["state"], masks, saved)

    def _check_groups(self, path: str, groups: list[dict[str, Any]]) -> None:
        theirs = _settings_by_name(groups)
        mine = {self.names[id(p)] for group in self.opt.param_groups for p in group["params"]}
        for name in sorted(mine ^ {name for name in theirs if self._is_own(name)}):
            who = "optimizer" if name in mine else "checkpoint"
            raise CheckpointError(
                f"'{path}' does not fit: '{name}' is in the {who} alone; build the optimizer on the "
                "same parameters as when it was saved"
            )
        for group in self.opt.param_groups:
            names = [self.names[id(param)] for param in group["params"]]
            for name in names:
                one, other = theirs[names[0]], theirs[name]
                if settings_key(one) != settings_key(other):
                    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
                    raise CheckpointError(
                        f"'{path}' does not fit: '{names[0]}' and '{name}' are in one group of the "
                        f"optimizer, and were saved with {key}={one.get(key)} and {other.get(key)}; build "
                        "the groups as when they were saved"
                    )

    def _check_tensors(
        self, path: str, state: dict[str, Any], masks: Mapping[str, Mask], saved: Shards
    ) -> None:
        params = {
            self.names[id(param)]: (param, group)
            for group in self.opt.param_groups
            for param in group["params"]
        }
        for name, content in state.items():
            if not self._is_own(name):
                continue
            if name not in params:
                raise CheckpointError(
                    f"'{path}' is damaged: it has optimizer state of '{name}', which is in none of its "
                    "groups; take another copy of the checkpoint"
                )
            param, group = params[name]
            shape = (masks[name].kept,) if name in masks else tuple(param.shape)
            for key, value in content.items():
                spec = _spec(value, saved)
                if key in _SHAPED and spec is not None and spec.shape != shape:
                    raise self._misfit(path, name, key, spec.shape)
            if isinstance(self.kind, AdamW) and content:
                found = {key: _spec(value, saved) for key, value in content.items()}
                self._check_adamw(path, name, found, param, group, shape)

    def _check_adamw(
        self,
        path: str,
        name: str,
        found: dict[str, Spec | None],
        param: Tensor,
        group: dict[str, Any],
        shape: tuple[int, ...],
    ) -> None:
        """Compare state with what the kernels take for granted."""
        is_lean = "exp_avg_scale" in found
        if is_lean != group["lean"]:
            kinds = ("exact", "lean")
            raise CheckpointError(
                f"'{path}' has {kinds[is_lean]} optimizer state and this optimizer keeps "
                f"{kinds[group['lean']]} state; build samo.AdamW with state='{kinds[is_lean]}'"
            )
        layout = _layout(param, self.model.entries[name].weight, group)
        if ("age" in found) != ("age" in layout):
            has = "age" in found
            raise CheckpointError(
                f"'{path}' has {'' if has else 'no '}step counts of the entries of '{name}'; build "
                f"samo.AdamW with entry_steps={has}"
            )
        expected = {
            key: (tuple(size) if key.endswith("_scale") else shape, dtype)
            for key, (dtype, size) in layout.items()
        }
        held = {key: spec and (spec.shape, spec.dtype) for key, spec in found.items()}
        if held != {"step": ((), torch.float32), **expected}:
            raise self._misfit(path, name, "state", held)

    def _misfit(self, path: str, name: str, key: str, found: object) -> CheckpointError:
        return CheckpointError(
            f"'{path}' does not fit: the optimizer's {key} of '{name}' is {found}, which is not that of "
            "this parameter; load it into the model it was saved from"
        )

    def fill(self, entry: dict[str, Any], saved: Shards) -> None:
        """Put a state that fits into the optimizer."""
        places: dict[str, torch.device] = dict.fromkeys(
            values.references(entry["more"]), torch.device("cpu")
        )
        cuts: dict[str, Tensor] = {}
        by_name = _settings_by_name(entry["groups"])
        for group in self.opt.param_groups:
            settings = next((by_name[self.names[id(param)]] for param in group["params"]), {})
            on_device = bool(settings.get("capturable") or settings.get("fused"))
            device = next((p.device for p in group["params"] if on_device), torch.device("cpu"))
            places |= dict.fromkeys(values.references(settings), device)
            for param in group["params"]:
                for key, value in entry["state"].get(self.names[id(param)], {}).items():
                    # torch reads step counts on the host, unless told to leave the host out.
                    is_host = key == "step" and not on_device and not isinstance(self.kind, AdamW)
                    place = torch.device("cpu") if is_host else param.device
                    places |= dict.fromkeys(values.references(value), place)
                    spec = _spec(value, saved)
                    if spec is not None and spec.shape == param.shape and pieces_of(param):
                        cuts[value["$tensor"]] = param
        tensors = {
            name: cut_as(value, cuts[name]) if name in cuts else value.to(places[name], copy=True)
            for name, value in saved.read(places)
        }
        self._load(entry, tensors)

    def _load(self, entry: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Load by torch's own way, which knows what other versions did not save."""
        groups, state = [], {}
        params: list[Tensor] = []
        by_name = _settings_by_name(entry["groups"])
        for group in self.opt.param_groups:
            indices = range(len(params), len(params) + len(group["params"]))
            settings = _settings(group)
            if group["params"]:
                saved = by_name[self.names[id(group["params"][0])]]
                # Each group has a tensor of its own, which may be changed in place.
                settings = values.decode(saved, lambda name: tensors[name].clone())
            groups.append({**settings, "params": list(indices)})
            params += group["params"]
        for index, param in enumerate(params):
            content = entry["state"].get(self.names[id(param)])
            if content is not None:
                state[index] = values.decode(content, tensors.__getitem__)
        more = values.decode(entry["more"], tensors.__getitem__)
        packed = {**more, "state": state, "param_groups": groups}
        if self.kind is not self.opt:
            self.opt.load_state_dict(packed)  # which gives each rank its part
            return
        self.opt.load_state_dict({**packed, "state": {}})
        for index, content in state.items():  # torch would cast it to the parameters' type
            self.opt.state[params[index]] = content

    def _is_own(self, name: str) -> bool:
        """Return whether a name of the checkpoint is not another stage's."""
        return not self.model.is_part or name in self.model.entries


def check_all(
    path: str,
    manifest: Manifest,
    optimizers: Sequence[OptimizerState],
    masks: Mapping[str, Mask],
    saved: Shards,
) -> None:
    """Refuse the states of other optimizers, before anything is changed.

    Raises:
        CheckpointError: There are none, others, or more or less.
    """
    entries = manifest.optimizers
    if not entries:
        raise CheckpointError(
            f"'{path}' was saved without an optimizer; load it with opt=None, or save with opt"
        )
    if len(entries) != len(optimizers):
        kinds = ", ".join(entry["class"] for entry in entries)
        raise CheckpointError(
            f"'{path}' has the state of {len(entries)} optimizers ({kinds}) and samo.load was given "
            f"{len(optimizers)}; give all of them, in that order, or load with opt=None"
        )
    named = {name for entry in entries for name in references_of(entry)}
    held = values.references([content for entry in entries for content in entry["state"].values()])
    if named != set(saved.specs) or len(held) != len(set(held)):
        raise CheckpointError(
            f"'{path}' is damaged: its optimizer state names {len(named):,} tensors, which are not "
            f"the {len(saved.specs):,} that are there; take another copy of the checkpoint"
        )
    for optimizer, entry in zip(optimizers, entries):
        optimizer.check_fits(path, entry, masks, saved)


def _names(opt: Optimizer, model: ModelState) -> dict[int, str]:
    """Return the names of the optimizer's tensors, by id."""
    known = {id(entry.tensor): name for name, entry in model.entries.items()}
    for i, group in enumerate(opt.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise CheckpointError(
                    f"group {i} of the optimizer has a tensor of shape {tuple(param.shape)} that is no "
                    "parameter of this model; build it on model.parameters(), after samo.compress_"
                )
    return known


_PACKED: Final = ("state", "param_groups")


def _spec(value: Any, saved: Shards) -> Spec | None:
    """Return what the file says of a tensor in an encoded state; None for all other values."""
    is_tensor = isinstance(value, dict) and set(value) == {"$tensor"}
    return saved.specs[value["$tensor"]] if is_tensor else None


def _settings_by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group["settings"] for group in groups for name in group["names"]}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _class_name(opt: Optimizer) -> str:
    cls = type(opt)
    for package in ("samo", "torch.optim"):
        if cls.__module__.startswith(f"{package}."):
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"
