r"""Find which layers share the channels of a BatchNorm, in the graph of a symbolically traced model.

    conv1 -> bn1 -> relu -> maxpool -> conv2 -> bn2 -> (+) -> ...
    \_ producer        followed \_ consumer             \_ not followed

A channel whose scale and shift are 0 leaves the BatchNorm as 0. From there the graph is followed
through operations that keep channels apart and 0 at 0; a convolution or linear layer at the end is a
consumer. At anything else, such as the sum of a residual network, the search ends, and the weights
behind it keep all of their inputs. If anything writes to the channels or to a view of them, all
consumers do. ``torch.fx`` does the tracing and runs no data.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from samo.early_bird.channels import BATCH_NORMS, TRANSPOSED, Channels, output_dim
from samo.errors import nearest

__all__ = []

_CONVS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
_LAYERS: Final = (nn.Linear, *_CONVS)

_PASSING_MODULES: Final = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish),
    *(nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.Hardtanh),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_PASSING_FUNCTIONS: Final[set[Any]] = {
    *(F.relu, F.relu_, F.relu6, F.leaky_relu, F.gelu, F.silu, F.hardswish, F.mish, F.elu, F.celu),
    *(F.selu, F.dropout, F.dropout2d, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d),
    *(F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d),
    *(F.adaptive_avg_pool3d, F.adaptive_max_pool1d, F.adaptive_max_pool2d, torch.relu, torch.tanh),
}
"""What keeps channels apart and makes 0 of 0; a sigmoid, for one, does not."""

_PASSING_METHODS: Final = {"relu", "relu_", "tanh", "contiguous", "clone"}

_FRESH: Final[set[Any]] = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.neg),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.cat, torch.stack, torch.mean),
    *("add", "sub", "mul", "div", "matmul", "mean", "sum", "size", "dim", "clone"),
}
"""What makes a tensor of its own, or none: to write to its result does nothing to its input."""

_WRITING_OPERATORS: Final[set[Any]] = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.ipow, operator.imod, operator.iand, operator.ior, operator.ixor, operator.setitem),
}


def find_channels(
    model: nn.Module, norms: Collection[str], pairs: Mapping[str, str] | None = None
) -> list[Channels]:
    """Return what belongs to each of the BatchNorm layers ``norms``.

    Args:
        model: The model; its ``forward`` is traced unless ``pairs`` are given.
        norms: Names of BatchNorm layers.
        pairs: BatchNorm to the layer before it, for models that cannot be traced. Then no consumers
            are looked for.

    Raises:
        ValueError: The model cannot be traced, or a BatchNorm does not follow a layer of its own.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    shared = _shared_weights(model)
    if pairs is not None:
        known = _first_names(pairs, norms, modules)
        return [_checked(Channels(norm, known[norm], ()), modules, shared) for norm in norms]
    graph = _trace(model)
    calls: dict[str, list[fx.Node]] = {}
    read: set[int] = set()  # modules whose parameters are used as plain tensors too
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
        elif node.op == "get_attr":
            read.add(id(modules.get(str(node.target).rpartition(".")[0])))
    once = {name for name, nodes in calls.items() if len(nodes) == 1} - shared
    once = {name for name in once if id(modules[name]) not in read}
    return [
        _checked(
            _of_norm(norm, calls.get(norm, []), modules, once, is_read=id(modules[norm]) in read),
            modules,
            shared,
        )
        for norm in norms
    ]


class _Proxy(fx.Proxy):
    """A value under tracing that tells ``y += z`` from ``y = y + z``, as torch's own does not."""


def _inplace(write: Any) -> Any:
    def method(self: _Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", write, (self, other), {})

    return method


for _write in _WRITING_OPERATORS - {operator.setitem}:
    setattr(_Proxy, f"__{_write.__name__}__", _inplace(_write))


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the value of a node."""
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node: torch's own are, and so are subclasses of these."""
        is_ours = isinstance(m, (*_LAYERS, *BATCH_NORMS))
        return is_ours or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.Graph:
    try:
        return _Tracer().trace(model)
    except Exception as error:  # whatever a forward does with what is not a tensor
        raise ValueError(
            f"the forward of {type(model).__name__} cannot be traced to find the layer before each "
            f"BatchNorm ({type(error).__name__}: {error}); name them with "
            "pairs={'name of the BatchNorm': 'name of the layer before it', ...}"
        ) from error


def _of_norm(
    norm: str,
    calls: list[fx.Node],
    modules: Mapping[str, nn.Module],
    once: Collection[str],
    *,
    is_read: bool,
) -> Channels:
    way_out = f"leave it out with skip=['{norm}.weight']"
    if len(calls) != 1:
        raise ValueError(
            f"BatchNorm '{norm}' is used {len(calls)} times in a forward pass, and its channels are "
            f"followed only where it is used once; {way_out}"
        )
    (call,) = calls
    if is_read:
        raise ValueError(
            f"scale or shift of BatchNorm '{norm}' is used elsewhere too, where it may be needed; "
            f"{way_out}"
        )
    source: Any = call.args[0] if call.args else call.kwargs["input"]
    while isinstance(source, fx.Node) and _is_module(source, modules, nn.Identity):
        source = source.args[0]
    if not (isinstance(source, fx.Node) and _is_module(source, modules, _LAYERS)):
        raise ValueError(
            f"BatchNorm '{norm}' follows '{source}', which is no convolution or linear layer whose "
            f"outputs could be pruned; {way_out}"
        )
    producer = str(source.target)
    if producer not in once or len(source.users) != 1:
        raise ValueError(
            f"'{producer}', the layer before BatchNorm '{norm}', is used elsewhere too, where its "
            f"outputs may be needed; {way_out}"
        )
    search = _Search(modules, once, modules[norm], modules[producer], {})
    search.follow(call, is_flat=False)
    found = () if _is_written(call, modules) else tuple(search.found)
    return Channels(norm, producer, found)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the layers that read nothing but the channels of one BatchNorm."""

    modules: Mapping[str, nn.Module]
    once: Collection[str]
    """Modules that are used once, and so have one input."""
    norm: nn.Module
    producer: nn.Module
    found: dict[str, None]

    def follow(self, node: fx.Node, *, is_flat: bool) -> None:
        for user in node.users:
            if not user.args or user.args[0] is not node:
                continue
            if _is_module(user, self.modules, _LAYERS):
                name = str(user.target)
                if name in self.once and self.reads(self.modules[name], is_flat=is_flat):
                    self.found[name] = None
            elif _is_flatten(user, self.modules) or self.is_mean(user):
                self.follow(user, is_flat=True)
            elif _passes(user, self.modules):
                self.follow(user, is_flat=is_flat)

    def reads(self, module: nn.Module, *, is_flat: bool) -> bool:
        """Return whether a layer's inputs are the channels or, flattened, the places of each in turn."""
        if isinstance(module, nn.Linear):
            # It reads the last dimension: the channels of (N, C), but a place of (N, C, ...).
            has_places = not is_flat and not isinstance(self.producer, nn.Linear)
            size = getattr(self.norm, "num_features", 0)
            return not has_places and module.in_features % size == 0
        return not is_flat and getattr(module, "groups", 0) == 1

    def is_mean(self, node: fx.Node) -> bool:
        """Return whether an operation averages each channel of (N, C, H, W) over all of its places."""
        dims: Any = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
        return (
            node.target in (torch.mean, "mean")
            and isinstance(self.norm, nn.BatchNorm2d)
            and isinstance(dims, list | tuple)
            and sorted(dims) in ([2, 3], [-2, -1])
            and not node.kwargs.get("keepdim", False)
        )


def _is_written(start: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a value, or what may be a view of it, is changed in place so that 0 may not stay 0."""
    seen: set[fx.Node] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.kwargs.get("out") is node or (_is_first(user, node) and _writes(user, modules)):
                return True
            is_layer = _is_module(user, modules, (*_LAYERS, *BATCH_NORMS))
            if user in seen or is_layer or user.target in _FRESH or not _is_first(user, node):
                continue
            seen.add(user)
            waiting.append(user)
    return False


def _is_first(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a node is what an operation works on."""
    first = user.args[0] if user.args else user.kwargs.get("input")
    return first is node


def _writes(user: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether an operation changes its first argument, other than by one that keeps 0 at 0."""
    if _passes(user, modules):
        return False
    if user.op == "call_module":
        return bool(getattr(modules[str(user.target)], "inplace", False))
    name = str(getattr(user.target, "__name__", user.target))
    is_inplace = name.endswith("_") and not name.endswith("__")
    return is_inplace or bool(user.kwargs.get("inplace")) or user.target in _WRITING_OPERATORS


def _passes(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if "out" in node.kwargs:
        return False
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, nn.Hardtanh) and not module.min_val <= 0 <= module.max_val:
            return False
        return isinstance(module, _PASSING_MODULES)
    if node.op == "call_function":
        return node.target in _PASSING_FUNCTIONS
    return node.op == "call_method" and node.target in _PASSING_METHODS


def _is_flatten(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether an operation makes (N, C * ...) of (N, C, ...)."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)
    rest: list[Any] = [*node.args[1:]]
    if node.target in (torch.flatten, "flatten"):
        return (rest == [1] and not node.kwargs) or (not rest and node.kwargs == {"start_dim": 1})
    if node.target in ("view", "reshape"):
        return len(rest) == 2 and rest[1] == -1 and _is_batch_size(rest[0], node.args[0])
    return False


def _is_batch_size(value: Any, source: Any) -> bool:
    """Return whether a value of the graph is ``source.size(0)`` or ``source.shape[0]``."""
    if not isinstance(value, fx.Node):
        return False
    if value.target == "size":
        return value.args == (source, 0)
    if value.target is not operator.getitem or value.args[1] != 0:
        return False
    shape: Any = value.args[0]
    is_shape = shape.target == "size" or (shape.target is getattr and shape.args[1] == "shape")
    return is_shape and shape.args[0] is source


def _is_module(node: fx.Node, modules: Mapping[str, nn.Module], kind: Any) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], kind)


def _shared_weights(model: nn.Module) -> set[str]:
    """Return the modules whose weight another one has too."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            users.setdefault(id(weight), []).append(name)
    return {name for names in users.values() if len(names) > 1 for name in names}


def _first_names(
    pairs: Mapping[str, str], norms: Collection[str], modules: Mapping[str, nn.Module]
) -> dict[str, str]:
    """Check pairs, and return them with the first of a module's names, by which masks are named."""
    first: dict[int, str] = {}
    for name, module in modules.items():
        first.setdefault(id(module), name)
    for name in [name for pair in pairs.items() for name in pair]:
        if name not in modules:
            raise ValueError(
                f"pairs names '{name}', which is no module of the model{nearest(name, modules)}; "
                "model.named_modules() lists them"
            )
    known = {first[id(modules[norm])]: first[id(modules[layer])] for norm, layer in pairs.items()}
    missing = [norm for norm in norms if norm not in known]
    if missing:
        raise ValueError(
            f"pairs names no layer for BatchNorm '{missing[0]}' ({len(missing)} of {len(norms)}); name "
            f"one, or leave it out with skip=['{missing[0]}.weight']"
        )
    return known


def _checked(
    channels: Channels, modules: Mapping[str, nn.Module], shared: Collection[str]
) -> Channels:
    producer, norm = modules[channels.producer], modules[channels.norm]
    if channels.norm in shared:
        raise ValueError(
            f"BatchNorm '{channels.norm}' shares its scale with another module, and its channels cannot "
            f"be pruned alone; leave it out with skip=['{channels.norm}.weight']"
        )
    if channels.producer in shared or _outputs(producer) != norm.num_features:
        raise ValueError(
            f"'{channels.producer}' ({type(producer).__name__}) cannot be the layer before BatchNorm "
            f"'{channels.norm}' of {norm.num_features} channels: it must be a convolution or linear "
            "layer with as many outputs and a weight of its own; correct pairs, or leave the BatchNorm "
            f"out with skip=['{channels.norm}.weight']"
        )
    return channels


def _outputs(module: nn.Module) -> int:
    if not isinstance(module, _LAYERS):
        return 0
    # Those of a transposed convolution with groups are spread over weights of all groups.
    return int(module.weight.shape[output_dim(module)])
