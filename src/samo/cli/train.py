"""``samo train`` and ``samo finetune``: a run from the settings to the report."""

import os
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from samo.cli.commands import Finetune, Train
from samo.cli.console import PatientConsole, facts, out_of_memory, say, show_sample
from samo.cli.display import Display
from samo.errors import RunError, SamoError, first_words
from samo.report.findings import held, ranks as mesh_of, warnings
from samo.report.runs import read_run
from samo.train import launch_env
from samo.train.events import Listener
from samo.train.finetune_config import FinetuneConfig
from samo.train.launch_env import is_first_rank, is_restarted
from samo.train.rank_group import RankGroup
from samo.train.resolve import again, resolve, resolve_resumed
from samo.train.rules import doubts
from samo.train.run_dir import RunDir, free_dir
from samo.train.trainer import Result, resume, train
from samo.utils.formatting import loss


def run(command: Train | Finetune) -> int:
    """Train, or resume a run."""
    # transformers shows bars and reminders of its own between the lines of the run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    console = PatientConsole()
    display = Display(console)
    advice = (
        "lower --batch-size and raise --accumulate by the same factor, or use --checkpointing or a "
        "shorter --context"
    )
    try:
        with out_of_memory(advice), display if is_first_rank() else nullcontext():
            result = _train(command, console, display)
    except RuntimeError as error:
        if isinstance(error, SamoError) or launch_env.num_ranks() == 1:
            raise
        # An error of a backend, for example of a torch schedule whose neighbour has failed.
        raise RunError(
            f"stopped by {type(error).__name__}: {first_words(error)}; "
            "look at the output of the other ranks, and resume with --resume"
        ) from error
    if result is None:
        return 0
    if is_first_rank():
        try:
            _summarise(console, result)
        except KeyboardInterrupt:  # training has ended, and with it the handling of signals
            say(console, f"the run is complete; samo report {result.folder} makes its report")
            return 130
    return 0 if result.signal is None else 128 + result.signal


def _train(command: Train | Finetune, console: Console, display: Display) -> Result | None:
    """Return how the run ended; None if it was complete, and nothing else is asked for."""
    listeners: list[Listener] = [display] if is_first_rank() else []

    def tell(text: str) -> None:
        if is_first_rank() and text:
            say(console, text)

    if command.resume is not None:
        path, folder = command.resume, RunDir.find(command.resume)
        recorded = folder.config()
        config = resolve_resumed(recorded, command)
        is_done = path == folder.path and folder.has_checkpoint and has_ended(path)
        if is_done and config.run.steps == recorded.run.steps:
            tell(f"'{path}' is complete; extend it with --steps")
            return None
        display.folder = folder.path
        tell(config.mesh.reason)
        if not folder.has_checkpoint:
            tell("the run has no checkpoint yet: it starts again at its first step")
        if is_restarted():  # the run has newer checkpoints by now than the one that was given
            path = folder.path
        return resume(path, config=config, listeners=listeners)
    resolved = resolve(command)  # before anything is created
    for doubt in doubts(resolved):
        tell(f"warning: {doubt}")
    tell(resolved.mesh.reason)
    if isinstance(resolved, FinetuneConfig) and resolved.prune.prunes:
        tell(_how_pruned(resolved.prune.method))
    ranks = RankGroup.join(resolved.mesh, resolved.run.device)
    name, runs = resolved.name, Path("runs")
    before = launch_env.restarted_dir(command.out, runs, name) if is_restarted() else None
    out = command.out or before or free_dir(runs, name)
    chosen, resumes = ranks.all_gather("the run folder", (str(out), before is not None))[0]
    display.folder = Path(chosen)
    if resumes:
        config = again(RunDir.find(display.folder).config(), command.mesh)
        return resume(display.folder, config=config, listeners=listeners, ranks=ranks)
    return train(resolved, display.folder, listeners=listeners, ranks=ranks)


def has_ended(path: Path) -> bool:
    """Return whether a run is complete, from the end of its metrics, which may be long."""
    return read_run(path, last_bytes=2**20).end == "done"


def _how_pruned(method: str) -> str:
    data = ", calibrated on training data" if method in ("wanda", "sparsegpt") else ""
    return f"the model is pruned first: --method {method}{data}"


def _how_saved(result: Result) -> str:
    if result.saved_step == result.step:
        return ", and saved"
    step = result.saved_step
    last = "there is no checkpoint" if step is None else f"the last checkpoint is of step {step:,}"
    return f", not saved, since its loss is not finite; {last}"


def _summarise(console: Console, result: Result) -> None:
    """Print the result, and where it is."""
    if result.signal is not None:
        say(console, f"interrupted at step {result.step:,}{_how_saved(result)}. To resume:")
        say(console, f"  {launch_env.resume_command(result.folder)}")
        return
    from samo.report.page import write_report  # loads matplotlib, for which there may be no time

    try:
        page = str(write_report([result.folder], result.folder / "report.html"))
    except RunError as error:
        page = f"none: {error}"
    run = read_run(result.folder)
    rows = {"validation loss": loss(result.valid_loss)}
    if run.evals and not run.evals[0].step:
        rows["before training"] = loss(run.evals[0].valid_loss)
    if run.num_ranks > 1:
        rows["ranks"] = mesh_of(run)
    if run.state is not None:
        rows["model state"] = held(run)
    rows["checkpoints"] = str(result.folder / "checkpoints")
    rows["report"] = page
    if (model := result.folder / "model").is_dir():
        rows["model"] = f"{model}, compressed"
    console.print()
    console.print(facts(rows))
    if wrong := warnings(run):
        say(console, f"warning: {wrong}")
    if model.is_dir():
        say(console, "\nTo use it:")
        say(console, f"  samo generate {model} --prompt TEXT  # or --chat, for a chat model")
        say(console, f"  samo export {model} --out DIR        # dense, for every tool")
        say(console, f"  import samo; AutoModelForCausalLM.from_pretrained('{model}')")
    show_sample(console, run)
