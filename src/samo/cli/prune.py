"""``samo prune``: masks from a model, and a summary."""

import json
import sys

from rich.console import Console
from torch import nn

from samo.cli.commands import Prune
from samo.cli.tables import mask_records, mask_table
from samo.errors import ConfigError, MaskError
from samo.integrations.model_folders import open_model
from samo.mask import mask_files
from samo.mask.masks import Masks
from samo.pruning.prune import prune
from samo.train.resolve import resolve_sparsity

__all__ = []


def run(command: Prune) -> int:
    """Draw masks, write them and show them."""
    if command.out.is_dir() or not command.out.parent.is_dir():
        raise ConfigError(
            f"--out is the file to write the masks to, and '{command.out}' is a folder or lies in one "
            "that does not exist"
        )
    if command.out.exists():
        mask_files.read(command.out)  # refuses to overwrite other files
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
    except MaskError:
        raise
    except ValueError as error:
        raise ConfigError(f"cannot prune '{command.source}': {error}") from error
    _check_zeros(model, masks, command)
    try:
        masks.save(command.out)
    except OSError as error:
        raise MaskError(f"cannot write '{command.out}': {error.strerror}") from error
    if command.json:
        summary = {"out": str(command.out), "kept": masks.kept, "numel": masks.numel}
        json.dump({**summary, "tensors": mask_records(masks)}, sys.stdout)
        sys.stdout.write("\n")
        return 0
    console = Console()
    console.print(mask_table(masks))
    console.print(f"written to {command.out}", soft_wrap=True, highlight=False, markup=False)
    return 0


def _check_zeros(model: nn.Module, masks: Masks, command: Prune) -> None:
    """Refuse to keep zeros of a model that is pruned already: which ones would be arbitrary."""
    if command.method == "random":
        return
    for name, param in masks.parameters_of(model).items():
        others = int(param.count_nonzero())
        if others < masks[name].kept:
            raise ConfigError(
                f"'{name}' has {others:,} weights other than 0, and this sparsity would keep "
                f"{masks[name].kept:,}, zeros among them; choose a higher --sparsity than "
                f"{1 - others / param.numel():.3f}, --method zeros for the masks it has, or --skip it"
            )
