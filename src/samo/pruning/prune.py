"""`prune`: choose the weights to keep, in each group of tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from samo.core.modules import named_weights
from samo.errors import MaskError
from samo.mask.mask import Mask
from samo.mask.masks import Masks
from samo.mask.prunable import dense_parameters
from samo.pruning.blocks import Batch, BlockModel
from samo.pruning.calibrated import CalibratedMethod, outlier_ratios, prune_blocks
from samo.pruning.scope import Group, Scope, check_choice, decide
from samo.pruning.topk import (
    count_finite_and_nonzero,
    equal_values,
    keep_largest,
    keep_neighbours,
)
from samo.pruning.zeros import warn_of_zeros
from samo.utils.validation import check_model, whole_number

Method = Literal["magnitude", "random", "wanda", "sparsegpt"]


def prune(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    method: Method = "magnitude",
    scope: Scope = "tensor",
    pattern: str | None = None,
    skip: Iterable[str] = (),
    rules: Mapping[str, float] | None = None,
    seed: int = 0,
    calibration: Iterable[Batch] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Masks:
    """Choose which weights of a model to keep.

    The model itself is not changed, **except by SparseGPT**, which sets the pruned weights to 0 and
    replaces the values of the others.

    Counts are exact: of ``n`` weights ``round(n * sparsity)`` are pruned. Ties are broken by a hash
    of name, place and ``seed``, which favours no layer or row and is the same on every device.

    Example:
        >>> import torch, samo
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> samo.prune(model, sparsity=0.9)
        Masks(2 tensors, 820 of 8,192 weights kept, sparsity 0.900)
        >>> masks = samo.prune(model, sparsity=0.9, scope="global", rules={"0.weight": 0.5})
        >>> masks["0.weight"].kept
        2048
        >>> samo.prune(model, pattern="2:4").sparsity
        0.5
        >>> from samo.models.gpt import GPT, GPTConfig
        >>> gpt = GPT(GPTConfig(num_layers=2, width=64, num_heads=2))
        >>> text = [torch.randint(0, 256, (4, 32)) for _ in range(2)]
        >>> samo.prune(gpt, 0.5, method="wanda", calibration=text)
        Masks(8 tensors, 49,152 of 98,304 weights kept, sparsity 0.500)

    Args:
        model: The model; the weights that `samo.prunable` names are pruned.
        sparsity: Fraction to prune, at least 0 and less than 1. At 0 a tensor gets no mask. May be
            omitted with a ``pattern``, which implies it, and with ``rules``, to prune nothing else.
        method: ``"magnitude"`` keeps the largest weights, ``"random"`` any. ``"wanda"`` multiplies
            magnitudes by the norms of the weights' inputs and compares them within each output.
            ``"sparsegpt"`` solves for the least change of each layer's output.
        scope: ``"tensor"`` prunes each tensor to ``sparsity``; ``"global"`` compares all of them,
            so that tensors with small weights lose more; ``"erk"`` prunes the model to ``sparsity``
            and each tensor to a density proportional to the sum of its sizes over their product
            (Erdos-Renyi-Kernel), at most 1, so that small tensors keep more; ``"owl"`` does so with
            blocks in place of tensors, and those with more outliers keep more.
        pattern: ``"n:m"``, such as ``"2:4"``: keep n of every m neighbours along a weight's inputs.
        skip: Shell-style patterns of weights to leave dense. Takes precedence over ``rules``.
        rules: Sparsities for weights that match a shell-style pattern, each tensor on its own,
            regardless of ``scope`` and ``pattern``; the last match wins. A pattern applies to the
            weights of `samo.prunable` that it matches or, if it matches none of them, as
            ``"lm_head.weight"``, to all that it matches.
        seed: Breaks ties, and draws the weights of ``method="random"``.
        calibration: For Wanda, SparseGPT and OWL: batches of tokens (B x T), or dicts of the
            model's inputs, without padding. The model needs an `nn.ModuleList` of blocks.
        device: Where to compute its blocks, one after the other. By default where the model is.
        progress: Called with the number of blocks done, and that of all.
    """
    check_model(model)
    seed = whole_number("seed", seed)
    check_choice("method", method, get_args(Method))
    _check_calibration(model, method, scope, calibration)
    parameters = dense_parameters(model)
    blocks: BlockModel | None = None
    if calibration is not None:
        num_walks = (scope == "owl") + (method in get_args(CalibratedMethod))
        blocks = BlockModel(model, calibration, device, num_walks, progress)

    def ratios(names: Sequence[str]) -> Sequence[float]:
        assert blocks is not None
        for name in names:
            _check_values(name, parameters[name])
        return outlier_ratios(blocks, {name: parameters[name] for name in names})

    groups = decide(
        model, parameters, sparsity, scope, pattern, skip, rules, ratios if blocks else None
    )
    nonzero: dict[str, int] = {}
    for group in groups:
        for name in group.names:
            nonzero[name] = _check_values(name, parameters[name], is_read=method != "random")
        if not group.kept:  # before SparseGPT changes anything
            raise _keeps_nothing(group, group.names[:1])
    warn_of_zeros(groups, nonzero, parameters)
    masks: dict[str, Mask] = {}
    if method == "wanda" or method == "sparsegpt":
        assert blocks is not None
        masks = prune_blocks(blocks, parameters, groups, method, seed)
    else:
        for group in groups:
            masks |= _masks(parameters, group, method, seed)
    for group in groups:
        if empty := [name for name in group.names if not masks[name].kept]:
            raise _keeps_nothing(group, empty)
    return Masks({name: masks[name] for name in parameters if name in masks})


def _check_calibration(model: nn.Module, method: Method, scope: Scope, calibration: object) -> None:
    """Refuse what calibrated methods cannot do, and calibration data that nothing would read."""
    is_calibrated = method in get_args(CalibratedMethod)
    needs = is_calibrated or scope == "owl"
    what = f"scope='{scope}'" if scope == "owl" else f"method='{method}'"
    if needs and calibration is None:
        raise ValueError(
            f"{what} looks at the inputs of the weights; pass calibration=batches, some of the "
            "model's usual tokens (B x T)"
        )
    if not needs and calibration is not None:
        raise ValueError(f"{what} reads no calibration data; choose 'wanda' or 'sparsegpt'")
    if is_calibrated and scope == "global":
        raise ValueError(
            f"{what} compares weights within a layer, since scores of different layers have "
            "different units; choose scope='tensor', 'erk' or 'owl'"
        )
    if needs and next(named_weights(model), None) is not None:
        raise ValueError(f"{what} takes a dense model; call samo.decompress_(model) first")


def _masks(
    parameters: Mapping[str, Tensor], group: Group, method: Method, seed: int
) -> dict[str, Mask]:
    values = {name: parameters[name].detach() for name in group.names}
    if method == "random":
        values = {name: equal_values(value.shape, value.device) for name, value in values.items()}
    if group.pattern is None:
        words = keep_largest(values, group.kept, seed)
    else:
        kept, size = group.pattern
        words = {
            name: keep_neighbours(name, value, group.input_dim, size, kept, seed)
            for name, value in values.items()
        }
    return {name: Mask(value.shape, words[name]) for name, value in values.items()}


def _keeps_nothing(group: Group, empty: Sequence[str]) -> MaskError:
    rules = ", ".join(f"'{name}': 0.5" for name in empty)
    return MaskError(
        f"sparsity {group.sparsity} would keep none of the weights of "
        f"{', '.join(map(repr, empty))}; prune less there with rules={{{rules}}}, or leave out "
        f"with skip={[*empty]}"
    )


def _check_values(name: str, dense: Tensor, *, is_read: bool = True) -> int:
    """Refuse weights that cannot be ranked, and return how many are nonzero; all, if not read."""
    if dense.is_meta:
        raise ValueError(f"'{name}' is on device 'meta' and has no values to choose from")
    if not dense.is_floating_point():
        raise ValueError(
            f"'{name}' is {dense.dtype}, but only floating-point weights can be pruned; leave it "
            f"out with skip=['{name}']"
        )
    if hasattr(dense, "__tensor_flatten__"):
        raise ValueError(
            f"'{name}' is a {type(dense).__name__}, not a plain tensor; prune and compress the "
            "model before it is sharded or quantized"
        )
    if not is_read:
        return dense.numel()
    num_finite, num_nonzero = count_finite_and_nonzero(dense)
    if bad := dense.numel() - num_finite:
        raise ValueError(
            f"{bad:,} of the {dense.numel():,} weights of '{name}' are NaN or infinite; repair the "
            f"checkpoint, use method='random' or leave it out with skip=['{name}']"
        )
    return num_nonzero
