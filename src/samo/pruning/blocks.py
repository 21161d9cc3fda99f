"""Run a model block by block over calibration data, with one block in memory at a time.

The model's own forward prepares what a block is given (masks, position embeddings, which may differ
from block to block): it runs with the blocks before it replaced by their stored output, and stops
when it calls the block. So nothing needs to be known of the model but where its blocks are.

    embed ─ block 0 ─ block 1 ─ block 2 ─ ...     to get the inputs of block 2
            stored    stored    stop
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

Batch = Tensor | Mapping[str, Any]
"""Tokens (B x T), or named inputs of the model."""


Run = Callable[[], Iterator[Any]]
"""Yields the output of a block for each batch, as its copy is now."""


class BlockModel:
    """A model as a sequence of blocks, with the calibration data.

    Args:
        model: The model, which stays where it is.
        calibration: Batches.
        device: Where blocks are computed. By default where the model is.
        num_walks: How often `walk` will be called.
        progress: Called with the number of blocks done, and that of all walks.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Iterable[Batch],
        device: torch.device | str | None = None,
        num_walks: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.path, self.blocks = find_blocks(model)
        self.home: Final = next(model.parameters()).device
        self.device: Final = self.home if device is None else torch.device(device)
        self.batches: Final = [_moved(_checked(batch), self.home) for batch in calibration]
        if not self.batches:
            raise ValueError("calibration has no batches; pass some of the model's usual inputs")
        self._model: Final = model
        self._progress: Final = progress
        self._num_done, self._num_all = 0, num_walks * len(self.blocks)
        self._outputs: list[Any] = []

    @torch.no_grad()
    def walk(self, wanted: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], Run]]:
        """Yield copies of the wanted parameters, block after block, and what runs the block.

        The copies may be changed: the next block is given what they make then.
        """
        names = {id(parameter): name for name, parameter in wanted.items()}
        inside = {id(parameter) for block in self.blocks for parameter in block.parameters()}
        for key, name in names.items():
            if key not in inside:
                raise ValueError(
                    f"'{name}' belongs to none of the blocks '{self.path}', so its inputs are not "
                    f"known; leave it out with skip=['{name}'], or use method='magnitude'"
                )
        with _evaluating(self._model):
            self._outputs = [None] * len(self.batches)
            for index, block in enumerate(self.blocks):
                own = dict(block.named_parameters())
                state = {name: _copied(tensor, self.device) for name, tensor in own.items()}
                state |= {name: t.to(self.device) for name, t in block.named_buffers()}
                run = partial(self._run, index, state)
                weights = {names[id(p)]: state[n] for n, p in own.items() if id(p) in names}
                yield weights, run
                if index + 1 < len(self.blocks):
                    for batch, output in enumerate(run()):
                        self._outputs[batch] = _moved(output, self.home)
                self._num_done += 1
                if self._progress is not None:
                    self._progress(self._num_done, self._num_all)
                state.clear()  # the caller may still hold both
                weights.clear()

    def _run(self, index: int, state: dict[str, Tensor]) -> Iterator[Any]:
        for batch in range(len(self.batches)):
            args, kwargs = self._inputs(index, batch)
            yield functional_call(self.blocks[index], state, args, kwargs)

    def _inputs(self, index: int, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the model gives to a block, on the device of the blocks."""
        called: list[int] = []
        found: list[Any] = []

        def forward(place: int, *args: Any, **kwargs: Any) -> Any:
            called.append(place)
            if len(called) <= index:
                return self._outputs[batch]
            found.append((args, kwargs))
            raise _Reached

        given = self.batches[batch]
        # Nothing keeps the exception: with its traceback it would keep all that the model computed.
        with suppress(_Reached), _replaced(self.blocks, forward):
            self._model(given) if isinstance(given, Tensor) else self._model(**given)
        if called != list(range(index + 1)):
            raise ValueError(
                f"the model does not call its {len(self.blocks)} blocks '{self.path}' once each, "
                f"in their order, but {called} to reach block {index}; use method='magnitude'"
            )
        return _moved(found.pop(), self.device)


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name and the parts of the largest `nn.ModuleList` of a model, by parameters."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            found[path] = sum(parameter.numel() for parameter in module.parameters())
    if not found or not max(found.values()):
        raise ValueError(
            f"a {type(model).__name__} has no nn.ModuleList of blocks to calibrate one after the "
            "other; use method='magnitude'"
        )
    path = max(found, key=lambda name: found[name])  # the outer one of two with equal counts
    return path, list(cast(nn.ModuleList, model.get_submodule(path)))


class _Reached(Exception):  # noqa: N818
    """Not an error: it ends a forward pass at a block."""


@contextmanager
def _replaced(modules: Sequence[nn.Module], forward: Any) -> Iterator[None]:
    """Call ``forward`` with the place of a module instead of its own."""
    before = [vars(module).get("forward") for module in modules]
    for place, module in enumerate(modules):
        vars(module)["forward"] = partial(forward, place)
    try:
        yield
    finally:
        for module, own in zip(modules, before):
            vars(module).pop("forward", None)  # a module may be there twice
            if own is not None:
                vars(module)["forward"] = own


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, and the cache of keys and values, which nothing would read.

    And the fast path of `nn.MultiheadAttention`, one operator that hides the products in it.
    """
    modes = [(module, module.training) for module in model.modules()]
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    if use_cache:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        if use_cache:
            config.use_cache = use_cache  # type: ignore[union-attr]
        for module, mode in modes:
            module.training = mode


def _checked(batch: object) -> Batch:
    if not isinstance(batch, Tensor | Mapping):
        raise TypeError(
            "calibration must be batches, each a tensor of tokens (B x T) or a dict of the model's "
            f"inputs, got {type(batch).__name__}"
        )
    if isinstance(batch, Tensor) and not batch.is_floating_point() and batch.dim() != 2:
        raise ValueError(
            f"a batch of calibration must be B x T tokens, got {tuple(batch.shape)}; pass a list "
            "of such batches"
        )
    return batch


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
