"""The class of a module with compressed parameters: a property for each.

There is one cached subclass per original class, so that `torch.compile` sees equal blocks as equal.
It keeps the original's name, and pickles as the original plus its compressed parameters.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samo.core.dense import DenseWeight, never_alone
from samo.core.shards import sharded_like, whole
from samo.core.weight import Weight, weight_of
from samo.errors import CompressionError, MaskError
from samo.mask.mask import Mask

WEIGHTS: Final = "_samo_weights"
"""Attribute that maps parameter names to weights."""

BITMAP: Final = "_bitmap"
"""Suffix of a mask's key in a state dict, which holds its bits and their SHA-256."""

_DIGEST_BYTES: Final = hashlib.sha256().digest_size

MIXINS: Final[dict[type, type]] = {}
"""Behaviour that other packages add to the compressed modules of a class and its subclasses."""


class CompressedModule(nn.Module):
    """Behaviour shared by all modules with compressed parameters."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the original's, which may keep a registry of subclasses."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in weights_in(self) and isinstance(value, nn.Parameter):
            self._assign(name, value)
        elif name.endswith(BITMAP) and name.removesuffix(BITMAP) in weights_in(self):
            self._check_bitmap(name.removesuffix(BITMAP), value)
        else:
            super().__setattr__(name, value)

    def _check_bitmap(self, name: str, value: Tensor) -> None:
        """Make ``module.weight_bitmap = tensor`` a check, for loaders that set what they read."""
        weight = weights_in(self)[name]
        if weight.mask is None or not torch.equal(value, to_bytes(weight.mask).to(value.device)):
            raise MaskError(
                f"the bitmap of '{weight.name}' is not that of its mask; compress the model with "
                "samo.masks(model, state_dict)"
            )

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        weights_in(self).pop(name, None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Assign as `__setattr__` does: a plain parameter would be trained without the mask."""
        if param is None:
            weights_in(self).pop(name, None)
        elif name in weights_in(self):
            if isinstance(param, DTensor):  # FSDP2 sets the attribute
                raise CompressionError(
                    f"'{weights_in(self)[name].name}' is compressed and has no rows or columns for "
                    "tensor parallelism to shard; leave it out of the plan, or use fully_shard"
                )
            self._assign(name, param)
            return
        super().register_parameter(name, param)

    def _assign(self, name: str, value: nn.Parameter) -> None:
        """Make ``module.weight = parameter`` write the values."""
        weights = weights_in(self)
        weight = weights[name]
        other = value._weight if isinstance(value, DenseWeight) else weight_of(value)
        if other is not None:  # module.weight = other.weight ties the two
            weights[name] = other
            self._parameters[name] = other.values
        elif value.shape == weight.values.shape or hasattr(value, "__tensor_flatten__"):
            old, self._parameters[name] = self._parameters.get(name), value
            if value is not weight.values and old is not weight.values:
                # load_state_dict(assign=True) has given other values to the module it was tied to.
                weights[name] = weight.with_values(value)
            elif isinstance(value, DTensor):
                weight.bind(value)
            elif type(value) is nn.Parameter:
                weight.take(value)
        else:
            weight.write(value.detach())
            weight.values.requires_grad_(value.requires_grad).grad = None

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the values, not the dense weight."""
        path, _, name = target.rpartition(".")
        module = self.get_submodule(path)
        if name in weights_in(module):
            return module._parameters[name]  # type: ignore[return-value]
        return super().get_parameter(target)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the values, but keep their dtype: ``.half()`` only changes the compute dtype."""
        weights = weights_in(self)
        for name, weight in weights.items():
            if self._parameters[name] is not weight.values:  # torch has parted it from its twin
                weights[name] = weight.with_values(self._parameters[name])  # type: ignore[arg-type]
        own = {id(weight.values) for weight in weights.values()}
        own |= {id(weight.values.grad) for weight in weights.values()}

        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()

        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in own and moved.dtype != tensor.dtype:
                return tensor.to(moved.device, copy=overwrites)  # not the memory of a twin
            return moved

        for weight in weights.values():
            weight.before_apply()
        result = super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        for name, weight in weights.items():
            weight.values = self._parameters[name]  # type: ignore[assignment]
            weight.after_apply(fn)
        return result

    def to_empty(self, **options: Any) -> Any:
        """Allocate memory as torch does, and keep tied parameters tied, which torch does not."""
        shared: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    shared.setdefault(param, []).append((module, name))
        super().to_empty(**options)
        for places in shared.values():
            found = [module._parameters[name] for module, name in places]
            param = next((each for each in found if each is not None and weight_of(each)), found[0])
            for module, name in places:
                module._parameters[name] = param
                if param is not None and (weight := weight_of(param)) is not None:
                    weights_in(module)[name] = weight
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for weight in weights_in(self).values():
            weight.sync_written()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, weight in weights_in(self).items():
            if weight.mask is not None:
                destination[prefix + name + BITMAP] = to_bytes(weight.mask)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Accept compressed values with the same mask, or a dense weight."""
        weights = weights_in(self)
        for name, weight in weights.items():
            key = prefix + name
            bitmap, given = state_dict.pop(key + BITMAP, None), state_dict.get(key)
            if not isinstance(given, Tensor) or weight.mask is None:
                continue
            if given.shape == weight.shape and (bitmap is None or given.dim() != 1):
                given = whole(given).to(weight.mask.words.device)
                weight.check_pruned(given)
                compressed = weight.layout.compress(given, given.dtype)
                state_dict[key] = sharded_like(compressed, weight.values)
            # One rank may read a file for all: torch sends the others their shards, and no bitmap.
            elif bitmap is None and strict and not isinstance(given, DTensor):
                missing_keys.append(key + BITMAP)
            elif bitmap is not None and (wrong := _compare(key, bitmap, weight.mask)):
                error_msgs.append(wrong)
                state_dict[key] = weight.values.detach()
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        for weight in weights.values() if swaps else ():
            weight.before_apply()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for weight in weights.values():
            if swaps:
                weight.bind(weight.values)
            else:
                weight.refresh()  # compiled code does not check whether it is stale

    def __reduce_ex__(self, protocol: Any) -> Any:
        for weight in weights_in(self).values():
            weight.sync_written()  # values are copied before their weight
        arguments = (original_class(self), tuple(weights_in(self)))
        return rebuild, arguments, self.__getstate__()  # type: ignore[no-untyped-call]


def weights_in(module: nn.Module) -> dict[str, Weight]:
    """Return the weights of one module by the names of their parameters."""
    return module.__dict__.get(WEIGHTS, _NONE)


_NONE: Final[dict[str, Weight]] = {}


def named_weights(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, Weight]]:
    """Yield names and compressed weights of a model, in the order of ``named_parameters()``."""
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, weight in weights_in(module).items():
            if id(weight) in seen and remove_duplicate:
                continue
            seen.add(id(weight))
            yield f"{path}.{name}" if path else name, weight


def set_weights(module: nn.Module, weights: dict[str, Weight]) -> None:
    """Give a module its compressed parameters and its subclass."""
    module.__dict__[WEIGHTS] = weights
    for name, weight in weights.items():
        module._parameters[name] = weight.values
    cls = original_class(module)
    module.__class__ = compressed_class(cls, tuple(weights))  # type: ignore[arg-type]


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before compression."""
    return type(module).__dict__.get("_samo_original", type(module))


@cache
def compressed_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass of ``cls`` whose parameters of these names are compressed."""
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_samo_original": cls,
    }
    namespace |= {name: _property(name) for name in names}
    namespace |= {name + BITMAP: _bitmap_property(name) for name in names}
    if issubclass(cls, nn.RNNBase):
        # RNNs compute with their own list of weights, which cuDNN wants in one buffer.
        namespace["_flat_weights"] = property(_flat_weights, lambda self, weights: None)
        namespace["flatten_parameters"] = lambda self: None
    added = (mixin for base, mixin in MIXINS.items() if issubclass(cls, base))
    return type(cls)(cls.__name__, (CompressedModule, *added, cls), namespace)  # type: ignore[misc]


def rebuild(cls: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty instance, for pickle and copy."""
    return (made := compressed_class(cls, names)).__new__(made)  # type: ignore[arg-type]


def _property(name: str) -> property:
    @never_alone
    def get(self: nn.Module) -> Any:
        try:
            weight, values = self.__dict__[WEIGHTS][name], self._parameters[name]
        except KeyError:  # it was deleted
            if name in self.__dict__:
                return self.__dict__[name]
            raise _missing(self, name) from None
        return weight.read(values)

    def set_(self: nn.Module, value: Any) -> None:
        if weight := weights_in(self).get(name):
            self._parameters[name] = weight.values  # weight_norm has deleted it
            raise CompressionError(
                f"'{weight.name}' is compressed, and a tensor in its place would be trained "
                "without a mask; apply weight_norm or spectral_norm before compress_, and use "
                "DistributedDataParallel instead of DataParallel"
            )
        self.__dict__[name] = value  # its parameter was deleted

    return property(get, set_)


def _missing(module: nn.Module, name: str) -> AttributeError:
    return AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")


def _bitmap_property(name: str) -> property:
    """Expose the mask's state dict entry as an attribute, for torch.distributed.checkpoint."""

    def get(self: nn.Module) -> Tensor:
        weight = weights_in(self).get(name)
        if weight is None or weight.mask is None:
            raise _missing(self, name + BITMAP)
        return to_bytes(weight.mask)

    return property(get)


def _flat_weights(self: Any) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


# Masks in a state dict --------------------------------------------------------------------------


def to_bytes(mask: Mask) -> Tensor:
    """Return a mask's bits and their fingerprint as bytes, on the mask's device."""
    digest = torch.frombuffer(bytearray.fromhex(mask.fingerprint()), dtype=torch.uint8)
    return torch.cat([mask.words.view(torch.uint8), digest.to(mask.words.device)])


def from_bytes(name: str, saved: Any, shape: Iterable[int]) -> Mask:
    """Return the mask that `to_bytes` wrote; raise MaskError if it is damaged or does not fit."""
    try:
        bits, digest = saved[:-_DIGEST_BYTES], saved[-_DIGEST_BYTES:].cpu()
        mask = Mask(shape, bits.clone().view(torch.int32))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise MaskError(f"the bitmap of '{name}' does not fit the model: {error}") from error
    if bytes(digest.tolist()).hex() != mask.fingerprint():
        raise MaskError(
            f"the bitmap of '{name}' is damaged: its bits do not match their fingerprint"
        )
    return mask


def _compare(name: str, saved: Any, mask: Mask) -> str:
    """Return what is wrong with a saved mask; "" if it equals the weight's."""
    try:
        if mask == from_bytes(name, saved, mask.shape):
            return ""
    except MaskError as error:
        return str(error)
    return f"'{name}' was saved with another mask; pass samo.masks(model, state_dict) to remap_"


def check_class(module: nn.Module, names: tuple[str, ...]) -> None:
    """Raise CompressionError if a module's class cannot be replaced."""
    cls = type(module)
    for name in names:
        if hasattr(module, name + BITMAP):
            raise CompressionError(
                f"a {cls.__name__} has '{name + BITMAP}', the name under which the state dict "
                f"would have the mask of its '{name}'; rename one of the two"
            )
    try:
        module.__class__ = compressed_class(cls, names)  # type: ignore[arg-type]
        module.__class__ = cls
    except Exception as error:
        raise CompressionError(
            f"the class {cls.__name__} cannot be replaced ({error}); compress the model before it "
            "is scripted, traced or wrapped"
        ) from error
