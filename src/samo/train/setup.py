"""What a run starts with: its data, a learner, and the record of it all."""

import datetime
from pathlib import Path
from typing import Any

from samo.data.batches import Batches
from samo.errors import DataError, RunError
from samo.train.config_io import to_dict
from samo.train.finetune_config import Resolved
from samo.train.launch_env import command_line, launcher
from samo.train.learner import Learner
from samo.train.rank_group import RankGroup
from samo.train.resolve import micro_batches
from samo.train.run_dir import RunDir
from samo.train.subject import Subject, Text
from samo.utils.environment import hardware, versions

__all__ = []


def open_same_text(subject: Subject, run: RunDir) -> Text:
    """Open the data of a run that resumes."""
    try:
        text = subject.open_text(run.path)
    except DataError as error:
        place = {"train": "NEW-PLACE", "finetune": "--data NEW-PLACE"}[subject.config.kind]
        again = f"samo {subject.config.kind} {place} --resume {run.path}"
        raise DataError(f"{error}; if the text has moved, name it again: {again}") from None
    recorded = run.read_run().get("data")
    if not isinstance(recorded, dict) or recorded.get("fingerprint") != text.fingerprint():
        raise RunError(
            f"the text of '{run.path}' has changed, and a run resumes with the same text only; "
            "restore the old files, or start a new run. (If the tokens in its folder 'data' are "
            "damaged, remove it)"
        )
    return text


def new_batches(config: Resolved, text: Text, ranks: RankGroup) -> Batches:
    """Return the batches of this rank, from the beginning of the text."""
    return Batches(
        text.train,
        context=config.model.context,
        batch_size=config.run.batch_size,
        seed=config.run.seed,
        part=ranks.part,
    )


def run_record(config: Resolved, out: Path, text: Text, learner: Learner) -> dict[str, Any]:
    """Return the content of run.json: what is run, on what, and where."""
    return {
        "name": out.resolve().name,
        "kind": config.kind,
        "command": command_line(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": {"num_params": learner.num_params},
        "data": {
            "train_tokens": text.train.num_tokens,
            "valid_tokens": text.valid.num_tokens,
            "tokenizer": text.tokenizer.name,
            "vocab_size": text.vocab_size,
            "fingerprint": text.fingerprint(),
        },
        "versions": versions(),
        "hardware": hardware(learner.device),
        **launch_record(config, learner.ranks),
    }


def launch_record(config: Resolved, ranks: RankGroup) -> dict[str, Any]:
    """Return the part of run.json that may change when a run resumes."""
    sizes = {"pipe": ranks.num_stages, "data": ranks.num_replicas}
    if ranks.num_stages > 1:
        sizes["micro_batches"] = micro_batches(config, ranks.num_replicas)
    return {"config": to_dict(config), "ranks": sizes, "launcher": launcher()}
