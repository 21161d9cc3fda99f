"""``samo prune``: a pruned model, or masks alone, and a summary."""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn

from samo.cli.commands import Prune
from samo.cli.console import PatientConsole, mask_table, say, steps_done
from samo.cli.text_model import with_tokenizer
from samo.data.calibration import calibration_batches, example_batches
from samo.data.examples import open_examples
from samo.data.rows import is_example_file
from samo.errors import CheckpointError, ConfigError, DataError, RunError
from samo.integrations import model_folders
from samo.mask.masks import Masks
from samo.mask.prunable import matrices
from samo.models.gpt import GPT
from samo.pruning.prune import prune
from samo.pruning.zeros import refuse_zeros
from samo.train.config import AUTO
from samo.train.launch_env import prune_command
from samo.train.resolve import device_and_dtype, resolve_sparsity
from samo.train.rules import pruning
from samo.utils.formatting import counted

_MASK_FILE: Final = ".safetensors"
_MAX_CONTEXT: Final = 2048


def run(command: Prune) -> int:
    """Choose masks, write them or a pruned model, and show them."""
    source = model_folders.find(command.source)
    is_language_model = source.hugging_face is not None
    _check_flags(command, is_language_model=is_language_model)
    out = command.out or _default_out(command, is_language_model=is_language_model)
    _check_new(out)
    is_folder = out.suffix != _MASK_FILE
    if is_folder and not is_language_model:
        raise ConfigError(
            f"--out must be a mask file for a model of samo train, such as {out}{_MASK_FILE}; "
            "folders are for Hugging Face models"
        )
    console = PatientConsole()
    model = model_folders.open_model(command.source)
    if is_folder:
        _move_to_disk(model, out.parent)
    masks = _choose(model, command, console)
    console.print(mask_table(masks))
    if is_folder:
        from samo.integrations.export import export

        masks.apply_(model)
        export(model, out, source=source.hugging_face, masks=masks)
    else:
        _check_new(out)  # another process may have written it meanwhile
        masks.save(out)
    say(console, f"written to {out}")
    if is_language_model and command.method == "magnitude":
        say(console, "Chosen by magnitude; --method wanda --calibration FILE usually loses less")
    if is_folder:
        say(console, f"To train it: samo finetune {out} --data FILE")
    elif is_language_model:
        say(console, f"To train: samo finetune {command.source} --masks {out} --data FILE")
    return 0


def _check_flags(command: Prune, *, is_language_model: bool) -> None:
    needs_text = command.method in ("wanda", "sparsegpt") or command.scope == "owl"
    what = "--scope owl" if command.scope == "owl" else f"--method {command.method}"
    if needs_text and command.calibration is None:
        raise ConfigError(f"{what} needs text to calibrate on: --calibration FILE")
    if not needs_text and command.calibration is not None:
        raise ConfigError(f"--calibration has no effect with {what}; leave one of them out")
    if command.sparsity == 0 and not command.rules and command.method != "zeros":
        raise ConfigError("--sparsity 0 prunes nothing; use one such as 0.5")
    is_file = command.out is not None and command.out.suffix == _MASK_FILE
    if command.method == "sparsegpt" and is_file:
        raise ConfigError(
            f"--method sparsegpt changes the weights that it keeps, so the masks in "
            f"'{command.out}' would not be enough; name a folder with --out"
        )
    is_given = command.sparsity != AUTO or command.pattern is not None or command.method == "zeros"
    if is_language_model and not is_given:  # the default, for GPTs of samo train, would ruin it
        raise ConfigError(
            "how much to prune? Pass --sparsity or --pattern; 50-70 % is sensible for language "
            f"models, with wanda or sparsegpt: {prune_command(command.source)}"
        )


def _default_out(command: Prune, *, is_language_model: bool) -> Path:
    if is_language_model and command.method != "zeros":
        return Path(f"{Path(os.path.abspath(command.source)).name}-pruned")  # not what it links to
    return Path(f"masks{_MASK_FILE}")


def _check_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError(f"'{out}' exists; choose another name with --out, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"--out must be in an existing folder, got '{out}'")


def _move_to_disk(model: nn.Module, folder: Path) -> None:
    """Give the matrices of a model memory in files, where it can be changed at no cost.

    Weights of a Hugging Face folder are mapped from its files; what is written to them becomes
    memory of the process, in the end that of the whole model.
    """
    try:
        for name in matrices(model):
            param = model.get_parameter(name)
            param.data = disk_copy(param, folder)
    except OSError as error:
        raise RunError(
            f"no room for a copy of the model in '{folder}': {error.strerror or error}; free some "
            "space, or choose another place with --out"
        ) from error


def disk_copy(tensor: Tensor, folder: Path) -> Tensor:
    """Return a copy of a CPU tensor in a file without a name, which ends with the tensor."""
    if not tensor.numel():
        return tensor.detach().clone()
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a full disk must show here, not as a bus error later
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        else:
            file.truncate(tensor.nbytes)
        memory = mmap.mmap(file.fileno(), tensor.nbytes)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())


def _choose(model: nn.Module, command: Prune, console: Console) -> Masks:
    if command.method == "zeros":
        try:
            return Masks.from_zeros(model, skip=command.skip)
        except ValueError as error:
            why = str(error).partition(";")[0]  # the rest is for Python
            raise ConfigError(
                f"'{command.source}' cannot be read as a pruned model: {why}; leave out --method "
                "zeros to prune it, or --skip a weight"
            ) from error
    how = {**command.choice(), "method": command.method, "seed": command.seed}
    how["sparsity"] = resolve_sparsity(command.sparsity, command.pattern)
    device = device_and_dtype(command.device)["device"]  # which refuses what is not there
    with pruning(command.source), steps_done(console, "calibrate", "block") as progress:
        if command.calibration is not None:
            batches = _batches(model, command)
            how |= {"calibration": batches, "device": device, "progress": progress}
        with refuse_zeros(otherwise="use --method zeros, leave those weights out with --skip"):
            return prune(model, **how)


def _batches(model: nn.Module, command: Prune) -> list[Tensor]:
    """Return the samples of the calibration text."""
    assert command.calibration is not None
    try:
        text = with_tokenizer(model, command.source)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; --calibration needs the model's tokenizer, copy its files there"
        ) from error
    most = min(text.context or _MAX_CONTEXT, _MAX_CONTEXT)
    context = most if command.context == AUTO else command.context
    if text.context is not None and context > text.context:
        raise ConfigError(f"--context {context:,} is more than the model's {text.context:,} tokens")
    if not isinstance(model, GPT) and is_example_file(command.calibration):
        return _examples(model, command, context)
    return calibration_batches(
        command.calibration, text.encode, command.samples, context, command.seed
    )


def _examples(model: Any, command: Prune, context: int) -> list[Tensor]:
    """Return samples of a file of examples, as samo finetune would read them."""
    from samo.integrations.model_tokenizer import ModelTokenizer

    assert command.calibration is not None
    with tempfile.TemporaryDirectory(prefix="samo-prune-") as cache:
        data = open_examples(
            [command.calibration],
            tokenizer=ModelTokenizer(model_folders.tokenizer_folder(command.source)),
            context=context,
            cache=Path(cache),
            vocab_size=model.config.get_text_config().vocab_size,
        )
        found = example_batches(data, samples=command.samples, context=context, seed=command.seed)
    if len(found) < command.samples:
        raise DataError(
            f"the {len(data):,} examples in '{command.calibration}' make "
            f"{counted(len(found), 'sample')} of {context:,} tokens, and {command.samples:,} are "
            "asked for; use more examples, or "
            f"--samples {len(found)} --context {context}"
        )
    return found
