"""The state of any torch optimizer by parameter name, as JSON that refers to tensors.

    class      "samo.AdamW"
    groups     [{"names": ["0.weight"], "settings": {"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}}}]
    state      {"0.weight": {"step": {"$tensor": "0.weight/step"}, ...}}

What `samo.AdamW` lists as remainder, correction or master is the weight's own rest, and is saved with
the model.
"""

import hashlib
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from samo.checkpoints import values
from samo.checkpoints.lean_parts import (
    PARTS,
    SCALES,
    are_parts,
    layout_of_parts,
    own_state,
    parts_of,
    scale_place,
)
from samo.checkpoints.manifest import Manifest
from samo.checkpoints.model_state import ModelState, owned_by, place_of
from samo.checkpoints.shards import Shards, Source, Spec, host_bytes, source_of
from samo.errors import CheckpointError
from samo.optim import AdamW
from samo.weights import Weight

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
        if not isinstance(opt, Optimizer):
            raise TypeError(
                f"opt must be a torch.optim.Optimizer, got {type(opt).__name__}; give a scaler as "
                "scaler=, and anything else in extra="
            )
        self.opt: Final = opt
        self.model: Final = model
        self.names: Final = _names(opt, model)

    def describe(self) -> tuple[dict[str, Any], dict[str, Source]]:
        """Return the optimizer's entry in a rank's share, and the tensors it refers to."""
        tensors: dict[str, Source] = {}
        digests: dict[str, str] = {}

        def encode(
            content: dict[str, Any], where: str, weight: Weight | None = None
        ) -> dict[str, Any]:
            def name_tensor(value: Any, where: str) -> str | None:
                if not isinstance(value, Tensor):
                    return None
                name = where
                while name in tensors:  # "a/b" of parameter "c" and "b" of parameter "c/a"
                    name += "_"
                tensors[name] = self._source(name, value, weight)
                return name

            encoded: dict[str, Any] = values.encode(
                content, where, name_tensor=name_tensor, keep_tuples=True
            )
            return encoded

        self._check_state()
        groups = [
            {
                "names": [self.names[id(param)] for param in group["params"]],
                "settings": encode(_settings(group), f"group {i}"),
            }
            for i, group in enumerate(self.opt.param_groups)
        ]
        for name, source in tensors.items():
            digests[name] = hashlib.sha256(host_bytes(source.make()).numpy().tobytes()).hexdigest()
        state = {}
        for param, content in self.opt.state.items():
            name = self.names[id(param)]
            weight = self.model.weights.get(name)
            if isinstance(self.opt, AdamW) and content:
                assert weight is not None
                self.opt._state_of(weight.part)  # takes up a rest loaded before it
                content = {key: content[key] for key in ("step", *self.opt._layout(weight.part))}
                if self.opt.is_lean and weight.part is not weight:
                    content[PARTS] = list(parts_of(weight))
            state[name] = encode(content, name, weight)
        entry = {
            "class": _class_name(self.opt),
            "groups": groups,
            "state": state,
            "skipped_steps": getattr(self.opt, "skipped_steps", 0),
            "digests": digests,
        }
        return entry, tensors

    def _source(self, name: str, value: Tensor, weight: Weight | None) -> Source:
        """Return a tensor of the state, with its place where it belongs to a rank's part of a weight."""
        place = None if weight is None else place_of(weight)
        if weight is None or place is None or value.dim() == 0:
            return source_of(name, value)
        if isinstance(self.opt, AdamW) and name.rstrip("_").endswith(SCALES):
            return source_of(name, value, scale_place(weight))
        if value.shape != weight.part.leaf.shape:
            raise CheckpointError(
                f"'{name}' has shape {tuple(value.shape)}, neither one number nor an entry for each of the "
                f"{weight.part.kept:,} that this rank has of the parameter, so ranks cannot put it "
                "together; replicate with shard=None"
            )
        return source_of(name, value, place)

    def _check_state(self) -> None:
        """Refuse an optimizer that keeps more than groups and the state of parameters."""
        if not isinstance(self.opt, AdamW):
            more = sorted(map(str, {*self.opt.state_dict()} - {"state", "param_groups"}))
            if more:
                raise CheckpointError(
                    f"{_class_name(self.opt)} keeps {more} beside the state of its parameters, which "
                    "samo.save does not know; leave out opt, and give opt.state_dict() piece by piece "
                    "in extra="
                )
        for param in self.opt.state:
            if not isinstance(param, Tensor) or id(param) not in self.names:
                raise CheckpointError(
                    f"{_class_name(self.opt)} keeps state that belongs to none of its parameters; "
                    "leave out opt, and save that state in extra="
                )

    # Loading -------------------------------------------------------------------------------------

    def tensors_of(self, manifest: Manifest) -> list[str]:
        """Return the names of the tensors in a checkpoint that this optimizer takes."""
        entry = manifest.optimizer or {"state": {}, "groups": []}
        state = [content for name, content in entry["state"].items() if self._is_own(name)]
        return values.references([*state, *(group["settings"] for group in entry["groups"])])

    def check_fits(self, path: str, manifest: Manifest, saved: Shards) -> None:
        """Refuse a state of another optimizer, before anything is changed.

        Raises:
            CheckpointError: There is none, or its class, its groups or its names differ.
        """
        entry = manifest.optimizer
        if entry is None:
            raise CheckpointError(
                f"'{path}' was saved without an optimizer; load it with opt=None, or save with opt"
            )
        if entry["class"] != _class_name(self.opt):
            raise CheckpointError(
                f"'{path}' has the state of a {entry['class']}, not of a {_class_name(self.opt)}; build "
                "the optimizer it was saved with, or load with opt=None"
            )
        self._check_groups(path, entry["groups"])
        settings = [group["settings"] for group in entry["groups"]]
        named = values.references([*entry["state"].values(), *settings])
        if sorted(named) != sorted(saved.specs):
            raise CheckpointError(
                f"'{path}' is damaged: its optimizer state names {len(named):,} tensors, which are not "
                f"the {len(saved.specs):,} that are there; take another copy of the checkpoint"
            )
        self._check_tensors(path, entry["state"], saved)

    def _check_groups(self, path: str, groups: list[dict[str, Any]]) -> None:
        own = [
            [self.names[id(param)] for param in group["params"]] for group in self.opt.param_groups
        ]
        if len(own) != len(groups):
            raise CheckpointError(
                f"'{path}' has {len(groups)} parameter groups and the optimizer {len(own)}; build the "
                "optimizer as when it was saved"
            )
        for i, (mine, group) in enumerate(zip(own, groups)):
            theirs = [n for n in group["names"] if self._is_own(n)]
            for name in sorted(set(mine) ^ set(theirs)):
                who = "optimizer" if name in mine else "checkpoint"
                raise CheckpointError(
                    f"'{path}' does not fit: '{name}' is in group {i} of the {who} alone; build the "
                    "optimizer on the same parameters as when it was saved"
                )

    def _check_tensors(self, path: str, state: dict[str, Any], saved: Shards) -> None:
        params = {self.names[id(param)]: param for param in self._params()}
        for name, content in state.items():
            if not self._is_own(name):
                continue
            if name not in params:
                raise CheckpointError(
                    f"'{path}' is damaged: it has optimizer state of '{name}', which is in none of its "
                    "groups; take another copy of the checkpoint"
                )
            weight = self.model.weights.get(name)
            shape = params[name].shape if weight is None else (weight.kept,)
            for key, value in content.items():
                spec = _spec(value, saved)
                if key in _SHAPED and spec is not None and spec.shape != shape:
                    raise self._misfit(path, name, key, spec.shape)
            if isinstance(self.opt, AdamW) and content:
                self._check_adamw(path, name, content, saved, self.opt)

    def _check_adamw(
        self, path: str, name: str, content: dict[str, Any], saved: Shards, opt: AdamW
    ) -> None:
        is_lean = "exp_avg_scale" in content
        if is_lean != opt.is_lean:
            kinds = ("exact", "lean")
            raise CheckpointError(
                f"'{path}' has {kinds[is_lean]} optimizer state and this optimizer keeps "
                f"{kinds[opt.is_lean]} state; build samo.AdamW with state='{kinds[is_lean]}'"
            )
        weight = self.model.weights[name]
        layout = opt._layout(weight)
        if PARTS in content and opt.is_lean:
            parts = content[PARTS]
            if not are_parts(parts, weight.kept):
                raise self._misfit(path, name, PARTS, parts)
            layout = layout_of_parts(layout, parts)
            content = {key: value for key, value in content.items() if key != PARTS}
        if ("age" in content) != ("age" in layout):
            has = "age" in content
            raise CheckpointError(
                f"'{path}' has {'' if has else 'no '}step counts of the entries of '{name}'; build "
                f"samo.AdamW with entry_steps={has}"
            )
        specs = {key: _spec(value, saved) for key, value in content.items()}
        found = {key: spec and (spec.shape, spec.dtype) for key, spec in specs.items()}
        expected = {key: ((size,), dtype) for key, (dtype, size) in layout.items()}
        if found != {"step": ((), torch.float32), **expected}:
            raise self._misfit(path, name, "state", found)

    def _misfit(self, path: str, name: str, key: str, found: object) -> CheckpointError:
        return CheckpointError(
            f"'{path}' does not fit: the optimizer's {key} of '{name}' is {found}, which is not that of "
            "this parameter; load it into the model it was saved from"
        )

    def fill(self, manifest: Manifest, saved: Shards) -> None:
        """Put a state that fits into the optimizer."""
        entry = manifest.optimizer
        assert entry is not None
        params = {self.names[id(param)]: param for param in self._params()}
        places: dict[str, torch.device] = {}
        cuts: dict[str, slice] = {}
        for group, theirs in zip(self.opt.param_groups, entry["groups"]):
            settings = {**group, **theirs["settings"]}
            on_device = bool(settings.get("capturable") or settings.get("fused"))
            device = next((p.device for p in group["params"] if on_device), torch.device("cpu"))
            places |= dict.fromkeys(values.references(theirs["settings"]), device)
            for param in group["params"]:
                name = self.names[id(param)]
                for key, value in entry["state"].get(name, {}).items():
                    # torch reads step counts on the host, unless told to leave the host out.
                    is_host = key == "step" and not on_device and not isinstance(self.opt, AdamW)
                    for tensor in values.references(value):
                        places[tensor] = torch.device("cpu") if is_host else param.device
                        cuts |= self._cut(tensor, name, saved)
        tensors = {
            name: (value[cuts[name]] if name in cuts else value).to(places[name], copy=True)
            for name, value in saved.read(places)
        }
        self._fill_groups(entry, tensors)
        for name, content in entry["state"].items():
            if name not in params:
                continue
            state = values.decode(content, tensors.__getitem__)
            if isinstance(self.opt, AdamW) and content:
                weight = self.model.weights[name]
                if self.opt.is_lean:
                    state = own_state(weight, state)
                self.opt.state[params[name]] = state
                self.opt._state_of(weight.part)  # hangs the weight's rest beside it
            else:
                self.opt.state[params[name]] = state

    def _cut(self, tensor: str, name: str, saved: Shards) -> dict[str, slice]:
        """Return what of a state tensor belongs to this rank, where that is not all of it."""
        weight = self.model.weights.get(name)
        owned = None if weight is None else owned_by(weight)
        is_whole = weight is None or owned is None or saved.specs[tensor].shape != (weight.kept,)
        is_lean = isinstance(self.opt, AdamW) and self.opt.is_lean
        return {} if is_whole or is_lean else {tensor: slice(*owned)}  # type: ignore[misc]

    def _is_own(self, name: str) -> bool:
        """Return whether a name of the checkpoint is not another stage's."""
        return not self.model.is_part or name in self.model.entries

    def _fill_groups(self, entry: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Set the groups by torch's own way, which knows what older versions did not save."""
        groups, count = [], 0
        for group, theirs in zip(self.opt.param_groups, entry["groups"]):
            settings = values.decode(theirs["settings"], tensors.__getitem__)
            indices = list(range(count, count + len(group["params"])))
            count += len(indices)
            own = _settings(group)
            own.pop("density_power", None)  # there was none where none was saved
            groups.append({**own, **settings, "params": indices})
        self.opt.load_state_dict(
            # No state: torch would cast it to the parameters' type.
            {"state": {}, "param_groups": groups, "skipped_steps": entry["skipped_steps"]}
        )

    def _params(self) -> list[Tensor]:
        return [param for group in self.opt.param_groups for param in group["params"]]


def _names(opt: Optimizer, model: ModelState) -> dict[int, str]:
    """Return the names of the optimizer's tensors, by id."""
    known = {id(entry.tensor): name for name, entry in model.entries.items()}
    for name, weight in model.weights.items():
        known.pop(id(weight.param))  # an optimizer has its leaf
        known[id(weight.part.leaf)] = name
    for i, group in enumerate(opt.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                right = "samo.parameters(model)" if model.is_compressed else "model.parameters()"
                raise CheckpointError(
                    f"group {i} of the optimizer has a tensor of shape {tuple(param.shape)} that is no "
                    f"parameter of this model; build it on {right}"
                )
    return known


def _spec(value: Any, saved: Shards) -> Spec | None:
    """Return what the file says of a tensor in an encoded state; None for all other values."""
    is_tensor = isinstance(value, dict) and set(value) == {"$tensor"}
    return saved.specs[value["$tensor"]] if is_tensor else None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _class_name(opt: Optimizer) -> str:
    cls = type(opt)
    for package in ("samo", "torch.optim"):
        if cls.__module__.startswith(f"{package}."):
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"
