"""The training loop: text in, checkpoints and metrics out.

    from samo.train.config import DataConfig, TrainConfig
    from samo.train.loop import train

    result = train(TrainConfig(data=DataConfig(train=(Path("notes.txt"),))), Path("runs/notes"))

A run is a function of its settings and its text. A step depends on nothing but the state that a
checkpoint holds: weights, moments, scaler, masks, the place in the text, the random generators. So a
run that was killed and resumed equals one that was not.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from samo.checkpoint import copy as copy_checkpoint
from samo.errors import ConfigError, DataError
from samo.train import snapshot
from samo.train.config import TrainConfig
from samo.train.config_files import to_dict
from samo.train.config_mesh import check_batch, in_any_grid
from samo.train.events import Listener
from samo.train.folder import RunFolder, check_free
from samo.train.launches import launcher
from samo.train.masking import Masking, check_masks
from samo.train.metrics import RankFile
from samo.train.ranks import Ranks
from samo.train.run import Result, Run
from samo.train.snapshot import Progress
from samo.train.starting import (
    check_changes,
    check_memory,
    check_same_text,
    layout,
    new_learner,
    on_this_machine,
    record,
)
from samo.train.text import Text, open_text

__all__ = ["Result", "resume", "train"]


def train(
    config: TrainConfig,
    out: Path,
    *,
    listeners: Iterable[Listener] = (),
    ranks: Ranks | None = None,
) -> Result:
    """Train a model from its first step on.

    Under torchrun every rank calls it alike; the first one writes the files.

    Args:
        config: The settings.
        out: The run folder to make; it must not exist, or be empty.
        listeners: Who is told what happens, beside the metrics file.
        ranks: The ranks, if they have met already.

    Raises:
        ConfigError: A setting is out of range, or two contradict each other.
        DataError: The text cannot be used.
        MaskError: The masks that are given do not fit.
        CheckpointError: ``model.init`` cannot be read, or a checkpoint cannot be written.
        RunError: The folder cannot be used, or the loss is no longer a number.
        PeerError: Another rank failed, died or hung.
    """
    config = on_this_machine(config)
    ranks = ranks or Ranks.join(config.mesh, config.run.device)
    with ranks.watched():
        check_batch(config, ranks.num_replicas)
        ranks.check_same("settings", to_dict(config))
        ranks.first("the run folder", lambda: check_free(out))
        text = ranks.first_then_others("the text", lambda: open_text(config, out))
        config = replace(config, data=replace(config.data, vocab_size=text.vocab_size))
        check_memory(config)
        learner = new_learner(config, ranks)
        ranks.together("the masks", lambda: check_masks(learner, config))
        masking = Masking(config, learner)
        folder = ranks.first("the run folder", lambda: RunFolder.create(out)) or RunFolder(out)
        try:
            ranks.first("run.json", lambda: folder.write_run(record(config, out, text, learner)))
            result = Run(config, folder, text, learner, masking, Progress(), listeners).go()
        finally:
            folder.close()
        learner.close()
        ranks.leave()
    return result


def resume(
    path: Path,
    *,
    config: TrainConfig | None = None,
    listeners: Iterable[Listener] = (),
    ranks: Ranks | None = None,
) -> Result:
    """Go on with a run that was interrupted or killed, exactly where its last checkpoint stands.

    Args:
        path: The run folder, or one of its checkpoints (``RUN/checkpoints/best``).
        config: Settings, of which a few may differ from the run's own: see ``CHANGEABLE``.
        listeners: Who is told what happens, beside the metrics file.
        ranks: The ranks, if they have met already; they need not be as many as before.

    Raises:
        RunError: It is no run folder, another process trains there, or its text has changed.
        ConfigError: A setting differs that cannot change.
        CheckpointError: The checkpoint is damaged, or belongs to another model.
    """
    folder = RunFolder.find(path)
    checkpoint = folder.last if folder.path == path else path
    recorded = folder.config()
    if config is None:
        config = in_any_grid(recorded)
    check_changes(recorded, config, is_resolved=False)  # before they contradict what was recorded
    config = on_this_machine(config)
    ranks = ranks or Ranks.join(config.mesh, config.run.device)
    with ranks.watched():
        check_batch(config, ranks.num_replicas)
        ranks.check_same("settings", to_dict(config))
        ranks.first("the run folder", folder.lock)
        try:
            check_changes(recorded, config)
            text = ranks.first_then_others("the text", lambda: _same_text(config, folder, path))
            # Killed before its first checkpoint was whole, a run starts again at its first step.
            has_checkpoint = checkpoint != folder.last or folder.has_checkpoint
            learner = new_learner(config, ranks, is_filled_later=has_checkpoint)
            masking = Masking(config, learner)
            progress = Progress()
            if has_checkpoint:
                progress = snapshot.restore(checkpoint, learner, masking)
            if config.run.steps < progress.step:
                raise ConfigError(
                    f"the run has taken {progress.step:,} steps already, more than the {config.run.steps:,} "
                    "asked for; leave --steps out, or give more"
                )
            if config.run.eval_batches != recorded.run.eval_batches:
                progress.best_loss = None  # losses on other batches are no measure for it
            if (config.run.weights, config.mesh.shard) != (
                recorded.run.weights,
                recorded.mesh.shard,
            ):
                progress.accounted = None  # it holds another number of bytes from here on

            def note_changes() -> None:
                if checkpoint != folder.last:
                    copy_checkpoint(checkpoint, folder.last)  # what comes after it is given up
                # Also of ranks that are no more.
                for file in folder.path.glob("metrics.rank*.jsonl"):
                    RankFile(file, step=progress.step, on_error=config.run.save_errors).close()
                old = folder.read_run()
                grid = layout(ranks, config)
                new = {**old, "config": to_dict(config), "ranks": grid, "launcher": launcher()}
                if new != old:
                    folder.write_run(new)

            ranks.first("the run folder", note_changes)
            result = Run(config, folder, text, learner, masking, progress, listeners).go()
        finally:
            folder.close()
        learner.close()
        ranks.leave()
    return result


def _same_text(config: TrainConfig, folder: RunFolder, path: Path) -> Text:
    try:
        text = open_text(config, folder.path)
    except DataError as error:
        raise DataError(
            f"{error}; a text that has moved is named again: samo train NEW-PLACE --resume {path}"
        ) from None
    check_same_text(folder, text)
    return text
