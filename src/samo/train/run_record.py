"""The record of a run, as it stands in ``run.json``."""

import datetime
import secrets
from pathlib import Path
from typing import Any

from samo.train.config_io import to_dict
from samo.train.finetune_config import Config
from samo.train.launch_env import command_line, launcher
from samo.train.learner import Learner
from samo.train.rank_group import RankGroup
from samo.train.rules import micro_batches
from samo.train.subject import Subject
from samo.utils.environment import hardware, versions


def run_record(subject: Subject, out: Path, learner: Learner) -> dict[str, Any]:
    """Return the content of run.json: what is run, on what, and where."""
    config, text = subject.config, subject.text
    return {
        "name": out.resolve().name,
        "id": secrets.token_hex(4),
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


def launch_record(config: Config, ranks: RankGroup) -> dict[str, Any]:
    """Return the part of run.json that may change when a run resumes."""
    sizes = {"pipe": ranks.num_stages, "data": ranks.num_replicas}
    if ranks.num_stages > 1:
        sizes["micro_batches"] = micro_batches(config, ranks.num_replicas)
    return {"config": to_dict(config), "ranks": sizes, "launcher": launcher()}
