"""``samo generate``: a model continues a text, or answers."""

import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text
from torch import Tensor

from samo.cli.commands import Generate
from samo.cli.console import PatientConsole, out_of_memory
from samo.cli.text_model import TextModel, open_frozen, with_tokenizer
from samo.errors import ConfigError, DataError
from samo.integrations import model_folders
from samo.integrations.generation import HuggingFaceText
from samo.models.generate import Sampling
from samo.train.resolve import device_and_dtype
from samo.utils.formatting import counted, duration, plain, three_digits

_MAX_BYTES: Final = 2**24
"""Longest prompt read from a pipe."""


def run(command: Generate) -> int:
    """Generate a text, or talk until the user ends it."""
    if command.chat and command.prompt is not None:
        raise ConfigError("--chat reads messages line by line; leave out --prompt")
    model_folders.find(command.model)  # refuses a wrong path before it reads a prompt
    prompt = "" if command.chat else _prompt(command.prompt)
    how = Sampling(command.max_tokens, command.temperature, command.top_p, command.seed)
    console = PatientConsole()
    with out_of_memory("use --weights streamed, or a shorter prompt"):
        device = device_and_dtype(command.device)["device"]
        opened = open_frozen(command.model, command.weights, device)
        model = with_tokenizer(opened, command.model)
        if command.chat:
            _chat(model, how, console, command.model)
        else:
            tokens = _checked(model.encode(prompt), model)
            console.print(Text(plain(prompt), style="dim"), end="", soft_wrap=True)
            _show(model, tokens, how)
    return 0


def _prompt(given: str | None) -> str:
    if given is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt; pass --prompt TEXT, pipe a text in, or use --chat")
        given = sys.stdin.read(_MAX_BYTES + 1).removesuffix("\n")
        if len(given) > _MAX_BYTES:
            raise DataError(f"the prompt has more than {_MAX_BYTES:,} characters; shorten it")
    if not given.strip():
        raise ConfigError("the prompt is empty; pass some text with --prompt, or pipe it in")
    return given


def _checked(tokens: Tensor, model: TextModel) -> Tensor:
    if not len(tokens):
        raise DataError("the prompt has no tokens; pass some text")
    if model.context is not None and len(tokens) >= model.context:
        raise DataError(
            f"the text has {len(tokens):,} tokens, and the model reads {model.context:,} with "
            "its answer; shorten the prompt, or start a new chat"
        )
    return tokens


def _chat(model: TextModel, how: Sampling, console: Console, path: Path) -> None:
    if not isinstance(model, HuggingFaceText) or not model.has_chat:
        raise ConfigError(
            f"'{path}' has no chat template, so its model was not made to chat; use --prompt"
        )
    messages: list[dict[str, str]] = []
    while (line := _read_line(console)) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        answer = _show(model, _checked(model.encode_chat(messages), model), how)
        messages.append({"role": "assistant", "content": answer})


def _read_line(console: Console) -> str | None:
    """Return a message, None at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing)

        try:
            return input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return None
    line = sys.stdin.readline()
    if line.strip():
        console.print(Text(f"> {plain(line.rstrip())}", style="dim"), soft_wrap=True)
    return line.rstrip("\n") if line else None


def _show(model: TextModel, tokens: Tensor, how: Sampling) -> str:
    """Print what follows tokens, then on stderr how fast it came; return it.

    Ctrl-C ends it early.
    """
    pieces: list[str] = []
    times = [time.perf_counter()]

    def write(text: str) -> None:
        pieces.append(text)
        sys.stdout.write(plain(text))
        sys.stdout.flush()

    try:
        model.stream(tokens, how, lambda: times.append(time.perf_counter()), write)
        end = ""
    except KeyboardInterrupt:
        end = ", stopped"
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    num_tokens = len(times) - 1
    if not end and model.context is not None and len(tokens) + num_tokens == model.context:
        end = ", the context is full"
    speed = ""
    if num_tokens > 1:  # the first token takes the whole prompt
        rate = (num_tokens - 1) / (times[-1] - times[1])
        speed = f", {three_digits(rate)} tokens/s; prompt read in {duration(times[1] - times[0])}"
    sys.stderr.write(f"{counted(num_tokens, 'token')}{speed}{end}\n")
    return "".join(pieces)
