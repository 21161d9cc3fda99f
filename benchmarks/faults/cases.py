"""Files of every kind that samo reads, and the public way to open each.

A way to open returns a digest of what was read. Where a checksum guards the files, damage by
accident must give an error or the same digest.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import samo
from samo.checkpoint import read_manifest
from samo.checkpoint.manifest import encode_manifest
from samo.cli.main import parse
from samo.data.tokenizers import open_tokenizer
from samo.data.tokens import open_tokens
from samo.report.page import write_report
from samo.train import events
from samo.train.config import DataConfig, ModelConfig, PruneConfig, RunConfig, TrainConfig
from samo.train.config_io import read_toml
from samo.train.trainer import resume, train
from samo.utils import safetensors_io

TEXT: Final = "the model keeps one weight of ten, and sends it to the others\n" * 60


class Case(NamedTuple):
    """A folder of files, how to open it, and whether checksums guard its values."""

    folder: str
    open: Callable[[Path], str]
    damaged: str  # pattern of the files that are damaged
    is_guarded: bool = False


def digest(*values: Any) -> str:
    """Return a hash of tensors and anything else."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(safetensors_io.host_bytes(value).numpy().tobytes())
        elif isinstance(value, dict):
            found.update(digest(*value.keys(), *value.values()).encode())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


# Checkpoints -------------------------------------------------------------------------------------


def model_and_optimizer(kind: str, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))
    opt: torch.optim.Optimizer
    if kind in ("dense", "ranks"):
        opt = torch.optim.AdamW(model.parameters())
    else:
        dtype = torch.float32 if kind == "f32" else torch.bfloat16
        lean = {"value_dtype": torch.bfloat16} if kind == "lean" else {}
        torch.manual_seed(0)
        masks = samo.prune(nn.Sequential(nn.Linear(40, 30), nn.Identity(), nn.Linear(30, 20)), 0.5)
        samo.compress_(model, masks, dtype=dtype, **lean)
        state = "lean" if kind == "lean" else "exact"
        opt = samo.AdamW(model.parameters(), state=state, entry_steps=kind == "f32")
    step(model, opt)
    return model, opt


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()


def state_of(model: nn.Module, opt: torch.optim.Optimizer) -> str:
    """Return a hash of all that training depends on."""
    return digest(model.state_dict(), *(dict(state) for state in opt.state.values()))


def open_checkpoint(kind: str, path: Path) -> str:
    model, opt = model_and_optimizer(kind)
    before = state_of(model, opt)
    try:
        extra = samo.load(path, model, opt)
    except BaseException:
        assert state_of(model, opt) == before, "a load that failed has changed the model"
        raise
    found = digest(state_of(model, opt), extra)
    step(model, opt)  # kernels read what was loaded
    return found


def split_rows(path: Path) -> None:
    """Cut the files of a checkpoint as two ranks would write them."""
    content = read_manifest(path).content
    folder = path / content["data"]
    for kind in ("weights", "optimizer"):
        whole = load_file(folder / f"{kind}.safetensors")
        cut = {name: t for name, t in whole.items() if t.dim()}
        for rank in range(2):
            rows = {n: [rank * (len(t) // 2), len(t)] for n, t in cut.items()}
            parts = {n: t[: len(t) // 2] if rank == 0 else t[len(t) // 2 :] for n, t in cut.items()}
            parts |= {n: t for n, t in whole.items() if not t.dim() and rank == 0}
            data = b"".join(safetensors_io.encode(parts, {"rows": json.dumps(rows)}))
            (folder / f"{kind}-rank{rank:05}.safetensors").write_bytes(data)
        (folder / f"{kind}.safetensors").unlink()
    content["files"] = {file.name: {} for file in folder.iterdir()}
    (path / "manifest.json").write_bytes(encode_manifest(content))
    seal(path)


def seal(path: Path) -> None:
    """Give a checkpoint checksums of what is in it, as an attacker would."""
    content = json.loads((path / "manifest.json").read_bytes())
    with contextlib.suppress(KeyError, TypeError, ValueError, OSError, AttributeError):
        for name in content["files"]:
            if not (path / content["data"] / name).is_file():
                continue
            data = (path / content["data"] / name).read_bytes()
            entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            content["files"][name] = entry
    with contextlib.suppress(ValueError, AttributeError):
        (path / "manifest.json").write_bytes(encode_manifest(content))


# Everything else ---------------------------------------------------------------------------------


def command(*words: str) -> str:
    """Run a command of samo without what turns errors into text."""
    import importlib

    found = parse(words)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        importlib.import_module(f"samo.cli.{words[0]}").run(found)
    return said.getvalue()


def open_masks(path: Path) -> str:
    return samo.load_masks(path / "masks.safetensors").fingerprint()


def open_report(path: Path) -> str:
    write_report([path / "run"], path / "run" / "report.html")
    return command("inspect", str(path / "run"))


def open_run(path: Path) -> str:
    result = resume(path / "run")
    return digest(result.step, result.valid_loss)


def open_cache(path: Path) -> str:
    """Open a text whose tokens are in a cache, or go there."""
    tokenizer = open_tokenizer(str(path / "tokenizer"))
    tokens = open_tokens([path / "notes.txt"], tokenizer=tokenizer, cache=path / "cache")
    return tokens.fingerprint()


def open_npy(path: Path) -> str:
    tokenizer = open_tokenizer("bytes")
    return open_tokens([path / "tokens.npy"], tokenizer=tokenizer, cache=path).fingerprint()


def build(home: Path) -> None:
    """Write the files of all cases."""
    for kind in ("f32", "bf16", "lean", "dense", "ranks"):
        extra = {"step": 3, "loss": [0.5, None], "seeds": torch.arange(5)}
        model, opt = model_and_optimizer(kind, seed=2)
        samo.save(home / kind, model, opt, extra=extra)
    split_rows(home / "ranks")
    (home / "files" / "tokenizer").mkdir(parents=True)
    samo.load_masks(home / "f32").save(home / "files" / "masks.safetensors")
    (home / "files" / "notes.txt").write_text(TEXT)
    os.utime(home / "files" / "notes.txt", (1e9, 1e9))
    np.save(home / "files" / "tokens.npy", np.arange(2000, dtype=np.uint16) % 200)
    (home / "files" / "config.toml").write_text(
        '[data]\ntrain = ["notes.txt"]\n[model]\nwidth = 64\n[run]\nsteps = 5\n[prune]\nsparsity = 0.8\n'
    )
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    tokenizer.save(str(home / "files" / "tokenizer" / "tokenizer.json"))
    for method, folder in (("rigl", "rigl"), ("early-bird", "bird")):
        (home / folder).mkdir()
        (home / folder / "notes.txt").write_text(TEXT)
        prune = PruneConfig(method=method, dense_steps=5, mask_every=1, queue=2, threshold=0.0)
        if method == "rigl":
            prune = PruneConfig(method=method, dense_steps=0, mask_every=2, mask_stop=6)
        config = TrainConfig(
            data=DataConfig(train=(home / folder / "notes.txt",)),
            model=ModelConfig(num_layers=1, width=32, num_heads=2, context=16),
            prune=prune,
            run=RunConfig(steps=6, batch_size=2, eval_every=2, eval_batches=1, sample_tokens=0),
        )
        train(config, home / folder / "run", listeners=[Stopper()])
        shutil.rmtree(home / folder / "run" / "tensorboard", ignore_errors=True)


class Stopper:
    """Stops a run before its end."""

    def on(self, event: events.Event) -> None:
        if isinstance(event, events.Ticked) and event.step == 4:
            signal.raise_signal(signal.SIGTERM)


def checkpoints(kind: str) -> list[Case]:
    return [
        Case(kind, lambda path: open_checkpoint(kind, path), "**/*.*", is_guarded=True),
        Case(kind, lambda path: command("inspect", "--verify", str(path)), "**/*.*"),
    ]


CASES: Final = {
    **{f"load {kind}": checkpoints(kind)[0] for kind in ("f32", "bf16", "lean", "dense", "ranks")},
    "inspect --verify": checkpoints("f32")[1],
    "resume, rigl": Case("rigl", open_run, "run/checkpoints/last/**/*.*", is_guarded=True),
    "resume, early-bird": Case("bird", open_run, "run/checkpoints/last/**/*.*", is_guarded=True),
    "resume, record": Case("rigl", open_run, "run/*.*"),
    "report": Case("rigl", open_report, "run/*.*"),
    "masks": Case("files", open_masks, "masks.safetensors", is_guarded=True),
    "token cache": Case("files", open_cache, "cache/*", is_guarded=True),
    "tokenizer": Case("files", open_cache, "tokenizer/*"),
    "tokens .npy": Case("files", open_npy, "tokens.npy"),
    "config TOML": Case(
        "files", lambda path: digest(read_toml(path / "config.toml")), "config.toml"
    ),
}
