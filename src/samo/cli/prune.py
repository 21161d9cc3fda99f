"""``samo prune``: masks from a model, and a summary."""

import json
import sys

from rich.console import Console

from samo.cli import Prune
from samo.cli.tables import mask_records, mask_table
from samo.errors import ConfigError, MaskError
from samo.masks import Masks
from samo.model_folders import open_model
from samo.pruning import prune

__all__ = []


def run(command: Prune) -> int:
    """Draw the masks, write them and show them."""
    if command.out.is_dir() or not command.out.parent.is_dir():
        raise ConfigError(
            f"--out is the file to write the masks to, and '{command.out}' is a folder or lies in one "
            "that does not exist"
        )
    model = open_model(command.source)
    try:
        if command.method == "zeros":
            masks = Masks.from_zeros(model, skip=command.skip)
        else:
            masks = prune(
                model,
                command.sparsity,
                method=command.method,
                scope=command.scope,
                skip=command.skip,
                rules=command.rules,
                seed=command.seed,
            )
    except MaskError:
        raise
    except ValueError as error:
        raise ConfigError(f"cannot prune '{command.source}': {error}") from error
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
    console.print(f"written to {command.out}", soft_wrap=True, highlight=False)
    return 0
