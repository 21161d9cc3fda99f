"""``samo evaluate``: how well a model predicts some data."""

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import nn

from samo.cli.commands import Evaluate
from samo.cli.console import PatientConsole, facts, out_of_memory, steps_done
from samo.cli.text_model import open_frozen, tokenizer_of
from samo.data.batches import Batches, validation_batches
from samo.data.rows import is_example_file
from samo.data.sources import Data, open_files
from samo.data.tokens import Tokens, open_tokens
from samo.errors import CheckpointError, ConfigError
from samo.integrations import causal_lm, model_folders
from samo.integrations.chunk_loss import chunk_loss_
from samo.integrations.model_tokenizer import ModelTokenizer
from samo.models.gpt import GPT
from samo.train.config import AUTO
from samo.train.learner import gpt_loss_sum
from samo.train.resolve import DTYPES, device_and_dtype
from samo.train.run_dir import RunDir
from samo.utils.formatting import counted, perplexity, three_digits

_MAX_EXPONENT: Final = 700.0
"""Of the largest float."""


def run(command: Evaluate) -> int:
    """Show the loss and the perplexity of a model."""
    if not command.data:
        raise ConfigError("name the data: --data FILE")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("samo evaluate runs in one process; start it without a launcher")
    model_folders.find(command.model)  # refuses a wrong path before it looks for a device
    how = device_and_dtype(command.device)
    if command.dtype != AUTO:
        how["dtype"] = DTYPES.get(command.dtype, command.dtype)
    # With --json, stdout has the result alone.
    console = PatientConsole(stderr=command.json)
    advice = "use a smaller --batch-size or --context, or --weights streamed"
    with out_of_memory(advice), tempfile.TemporaryDirectory(prefix="samo-evaluate-") as cache:
        dtype = getattr(torch, how["dtype"])
        model = open_frozen(command.model, command.weights, how["device"], dtype).eval()
        config: Any = model.config
        longest = config.context if isinstance(model, GPT) else causal_lm.context_of(config)
        context = causal_lm.resolve_context(command.context, longest)
        data = _open(command, model, context, Path(cache))
        if command.context == AUTO and isinstance(data, Tokens):
            context = max(1, min(context, sum(map(len, data.segments)) - 1))
        if getattr(data, "is_packed", False):
            causal_lm.check_packing(model)
        found = _measure(model, data, context, command, console)
    _show(found | how, command, console)
    return 0


def _open(command: Evaluate, model: Any, context: int, cache: Path) -> Data:
    if isinstance(model, GPT):
        tokenizer = tokenizer_of(RunDir.find(command.model))
        known = model.config.vocab_size
        if any(map(is_example_file, command.data)):
            raise ConfigError(
                "a GPT of samo train reads text or token files, no examples; write their text to "
                "a .txt file"
            )
        return open_tokens(command.data, tokenizer=tokenizer, cache=cache, vocab_size=known)
    return open_files(
        command.data,
        tokenizer=ModelTokenizer(model_folders.tokenizer_folder(command.model)),
        context=context,
        cache=cache,
        vocab_size=model.config.get_text_config().vocab_size,
        is_packed=command.pack,
    )


@torch.no_grad()
def _measure(
    model: nn.Module, data: Data, context: int, command: Evaluate, console: Console
) -> dict[str, Any]:
    """Return the loss per token, and what was read in which time."""
    size = command.batch_size
    sequences = Batches(data, context=context, batch_size=size, seed=0).num_windows
    total = -(-sequences // size)
    if command.max_batches != AUTO:
        total = min(total, command.max_batches)
    batches = validation_batches(data, context=context, batch_size=size, max_batches=total)
    loss_sum = gpt_loss_sum
    if not isinstance(model, GPT):
        causal_lm.check_model(model)
        chunk_loss_(model)  # logits of a large vocabulary would take more than the model
        loss_sum = causal_lm.cross_entropy_of
    device, total_loss, tokens = next(model.parameters()).device, 0.0, 0
    started = time.perf_counter()
    with steps_done(console, "evaluate", "batch") as show:
        for number, batch in enumerate(batches, 1):
            total_loss += float(loss_sum(model, batch.trimmed().to(device)))
            tokens += batch.num_tokens
            show(number, total)
    seconds = time.perf_counter() - started
    loss = total_loss / tokens
    if not math.isfinite(loss):
        raise CheckpointError(
            f"'{command.model}' has a loss of {loss} on this data: it has weights that are NaN or "
            f"infinite, or is too large for {next(model.parameters()).dtype}; try --dtype fp32"
        )
    return {
        "model": str(command.model),
        "data": list(map(str, command.data)),
        "loss": loss,
        "perplexity": math.exp(loss) if loss < _MAX_EXPONENT else None,
        "tokens": tokens,
        "sequences": min(sequences, total * size),
        "context": context,
        "tokens_per_s": tokens / seconds,
    }


def _show(found: dict[str, Any], command: Evaluate, console: Console) -> None:
    if command.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
        return
    sequences = counted(found["sequences"], "sequence")
    read = f"{found['tokens']:,} predicted, in {sequences} of {found['context']:,}"
    speed = f"{three_digits(found['tokens_per_s'])} on {found['device']} in {found['dtype']}"
    rows = {
        "model": found["model"],
        "data": ", ".join(found["data"]),
        "loss": f"{found['loss']:.4f}",
        "perplexity": perplexity(found["loss"]),
        "tokens": read,
        "tokens/s": speed,
    }
    console.print(facts(rows))
