"""How a module holds its compressed weights: hooks that hand them out, and a class for the root.

Each module that owns parameters gets an `Owner`. Before the module's forward pass a tap stands in the
place of each parameter; after it, the parameter again. The root module gets a class of the same name
with two methods more, for the two calls that torch has no hook for.
"""

import types
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from samo.errors import CompressionError
from samo.weights import Weight

__all__ = []

_ATTRIBUTE: Final = "_samo_owner"
_HOOK: Any = "samo"


def owned_weights(model: nn.Module) -> dict[str, Weight]:
    """Return the compressed weights under ``model`` by name, each once, as ``named_parameters`` would."""
    return weights_in(model.named_modules())


def weights_in(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Weight]:
    """Return the compressed weights of modules, which come with their names; each weight once."""
    found: dict[str, Weight] = {}
    seen: set[int] = set()
    for path, module in modules:
        owner: Owner | None = module.__dict__.get(_ATTRIBUTE)
        for name, weight in owner.weights.items() if owner is not None else ():
            if id(weight) not in seen:
                seen.add(id(weight))
                found[f"{path}.{name}" if path else name] = weight
    return found


def put_back_taps(model: nn.Module) -> None:
    """Put the parameters back in their places where a forward pass was interrupted (Ctrl-C)."""
    for module in model.modules():
        put_back(module)


def put_back(module: nn.Module) -> None:
    """Put the parameters of one module back in their places."""
    owner: Owner | None = module.__dict__.get(_ATTRIBUTE)
    if owner is not None and owner.taps:
        owner.put_back(module)


class Owner:
    """The compressed weights of one module."""

    def __init__(self, weights: dict[str, Weight]) -> None:
        self.weights: Final = weights
        self.taps: Final[dict[str, torch.Tensor]] = {}

    def attach(self, module: nn.Module) -> None:
        """Hang the hooks on ``module``, which does not become part of this object."""
        module.__dict__[_ATTRIBUTE] = self
        # Not by register_forward_hook, which numbers the hooks: torch.compile would see another
        # number in every block and compile each anew instead of reusing the first one's code.
        module._forward_pre_hooks[_HOOK] = _before_forward
        module._forward_hooks[_HOOK] = _after_forward
        # Also when forward raises: the early stop of a recomputation is an exception.
        module._forward_hooks_always_called[_HOOK] = True
        module.register_load_state_dict_post_hook(_after_load)

    def put_back(self, module: nn.Module) -> None:
        """Put the parameters in the place of their taps."""
        for name in self.taps:
            module._parameters[name] = self.weights[name].param
        self.taps.clear()


def _before_forward(module: nn.Module, args: object) -> None:
    """Put a tap in the place of each parameter."""
    if torch.compiler.is_compiling():
        return  # a compiled region computes with the parameters and their own hooks
    if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise CompressionError(
            "DistributedDataParallel cannot wrap a compressed model: it waits for dense gradients, "
            "and these are compressed before it would see them, so that replicas drift apart. "
            "Use samo.replicate(model, mesh['data']) instead"
        )
    owner: Owner = module.__dict__[_ATTRIBUTE]
    held = module._parameters
    for name, weight in owner.weights.items():
        current = held.get(name)
        if current is not weight.param and current is not owner.taps.get(name, weight.param):
            raise CompressionError(
                f"parameter '{weight.name}' was replaced after compress_ (by FSDP, a "
                "parametrization or an assignment?); change it in place, or compress the model "
                "after the change"
            )
        weight.check()
    # Transforms of torch.func differentiate the parameters they were given.
    if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    for name, weight in owner.weights.items():
        if weight.param.requires_grad:
            owner.taps[name] = weight.tap()
    module._parameters.update(owner.taps)  # type: ignore[arg-type]


def _after_forward(module: nn.Module, args: object, output: object) -> None:
    """Put the parameters back in their places."""
    if torch.compiler.is_compiling():
        return
    module.__dict__[_ATTRIBUTE].put_back(module)


def _after_load(module: nn.Module, incompatible_keys: object) -> None:
    """Take over what ``load_state_dict`` brought, also where it assigned new parameters."""
    owner: Owner = module.__dict__[_ATTRIBUTE]
    for name, weight in owner.weights.items():
        loaded = module._parameters.get(name)
        if loaded is not None and loaded is not weight.param:
            weight.param.detach().copy_(loaded.detach())
            module._parameters[name] = weight.param
        weight.check()


class _Compressed(nn.Module):
    """What the root of a compressed model does otherwise than the module it was."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the compressed gradients."""
        super().zero_grad(set_to_none)
        for weight in owned_weights(self).values():
            if weight.replica is not None:
                weight.replica.clear()
            for leaf in {weight.leaf, weight.part.leaf}:
                if set_to_none:
                    leaf.grad = None
                elif leaf.grad is not None:
                    leaf.grad.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the compressed state along with the model; refuse another type."""
        weights = owned_weights(self).values()
        for weight in weights:
            weight.check()
            probe = fn(torch.empty(0, dtype=weight.dtype, device=weight.param.device))
            if probe.dtype != weight.dtype:
                raise CompressionError(
                    f"'{weight.name}' is compressed as {_name(weight.dtype)} and cannot become "
                    f"{_name(probe.dtype)}; give the type to samo.compress_(model, masks, "
                    f"dtype=torch.{_name(probe.dtype)}) instead"
                )
            if probe.device != weight.device and weight.replica is not None:
                raise CompressionError(
                    f"'{weight.name}' is replicated on {weight.device} and cannot move to "
                    f"{probe.device}; move the model before samo.replicate"
                )
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in weights:
            weight.move()
        return result


def compressed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class of the same name that inherits from `_Compressed` first."""
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    made = types.new_class(
        cls.__name__, (_Compressed, cls), exec_body=lambda body: body.update(namespace)
    )
    made.__doc__ = cls.__doc__
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
