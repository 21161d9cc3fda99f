"""``samo prune``: masks from a model, and a summary."""

from torch import nn

from samo.cli.commands import Prune
from samo.cli.console import PatientConsole, mask_table, say
from samo.errors import ConfigError
from samo.integrations.model_folders import open_model
from samo.mask.masks import Masks
from samo.pruning.prune import prune
from samo.train.resolve import check_ranges, resolve_sparsity

__all__ = []


def run(command: Prune) -> int:
    """Choose masks, write them and show them."""
    if command.out.is_dir() or not command.out.parent.is_dir():
        raise ConfigError(f"--out must be a file in an existing folder, got '{command.out}'")
    if command.out.exists():
        raise ConfigError(f"'{command.out}' exists; choose another file with --out, or remove it")
    check_ranges(command)
    model = open_model(command.source)
    try:
        if command.method == "zeros":
            masks = Masks.from_zeros(model, skip=command.skip)
        else:
            masks = prune(
                model,
                resolve_sparsity(command.sparsity, command.pattern),
                method=command.method,
                scope=command.scope,
                pattern=command.pattern,
                skip=command.skip,
                rules=command.rules,
                seed=command.seed,
            )
    except ValueError as error:
        if command.method == "zeros":
            why = str(error).partition(";")[0]  # the rest is for Python
            raise ConfigError(
                f"'{command.source}' cannot be read as a pruned model: {why}; leave out --method "
                "zeros to prune it, or --skip a weight"
            ) from error
        raise ConfigError(f"cannot prune '{command.source}': {error}") from error
    _check_zeros(model, masks, command)
    masks.save(command.out)
    console = PatientConsole()
    console.print(mask_table(masks))
    say(console, f"written to {command.out}")
    return 0


def _check_zeros(model: nn.Module, masks: Masks, command: Prune) -> None:
    """Refuse to keep zeros of a model that is pruned already: which ones would be arbitrary."""
    if command.method == "random":
        return
    for name, param in masks.parameters_of(model).items():
        nonzero = int(param.count_nonzero())
        if nonzero < masks[name].kept:
            raise ConfigError(
                f"'{name}' has only {nonzero:,} nonzero weights, and {masks[name].kept:,} would be "
                f"kept; raise --sparsity above {1 - nonzero / param.numel():.3f}, "
                "use --method zeros, or --skip it"
            )
