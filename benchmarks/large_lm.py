"""Does a large language model train in a given memory with samo finetune, and how fast is that?

    python -m benchmarks.large_lm llama-3-8b --sparsity 0.8 --limit-gb 24 --peers flashoptim bitsandbytes
    python -m benchmarks.large_lm llama-3-70b --sparsity 0.9 --in-python

Writes a compressed folder of the shape with random weights, without a dense model, and trains it with
`samo finetune`, streamed and lean, once with its embeddings and once with them frozen. Then the dense
model takes the same batches with optimizers of other projects, blocks checkpointed and the loss in
chunks alike. The limit holds for everything that torch allocates in samo's runs. ``--in-python``
trains with the library instead of the command, and writes nothing: a model of 70B and its state are 100 GB.
"""

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import samo
from benchmarks.contenders import UnavailableError, peer
from benchmarks.measure import Row, arguments, show, write_rows
from samo.cli.main import main as cli
from samo.core.modules import named_weights
from samo.integrations.causal_lm import checkpoint_blocks, freeze_embeddings_
from samo.mask.prunable import dense_parameters, prunable
from samo.planner.public_models import PUBLIC

COLUMNS = ["contender", "tokens_per_s", "step_ms", "allocated_gb", "peak_gb", "loss", "error"]


def config_of(options: argparse.Namespace) -> Any:
    """Return the config of the shape, or of a tiny one like it."""
    shape = dict(PUBLIC[options.shape])
    if options.toy:
        shape |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    return AutoConfig.for_model(**shape)


def random_model(options: argparse.Namespace, device: torch.device) -> Any:
    """Return the pruned model with random weights and masks, without a dense one on the way."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config_of(options), dtype=torch.bfloat16)
    own, masks = dense_parameters(model), dict[str, samo.Mask]()
    for name in prunable(model):
        kept = torch.rand(own[name].shape, device=device) >= options.sparsity
        masks[name] = samo.Mask.from_bool(kept)
    narrow = dict.fromkeys(("dtype", "value_dtype", "grad_dtype"), torch.bfloat16)
    samo.compress_(model, samo.Masks(masks), weights="streamed", **narrow)
    model.to_empty(device=device)
    model.tie_weights()  # which to_empty parts
    pruned = {name for name, _ in named_weights(model)}
    for name, param in model.named_parameters():
        if name not in pruned and param.dim() == 1:
            param.data.fill_(1)  # norms
        else:
            param.data.normal_(std=0.02)
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config).to(device)  # its buffers are in no state dict
    others = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    if others := {name for name in others if "rotary_emb" not in name}:
        raise SystemExit(f"{options.shape} has buffers that are not filled: {', '.join(others)}")
    return model


def write_model(folder: Path, options: argparse.Namespace, device: torch.device) -> None:
    """Write the model and a tokenizer of bytes."""
    random_model(options, device).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextmanager
def limited(num_bytes: float | None, device: torch.device) -> Iterator[None]:
    """Let torch allocate no more than so many bytes on the GPU."""
    if device.type != "cuda":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (num_bytes or whole) / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def peaks_gb(device: torch.device) -> Row:
    """Return the most that tensors took, and that torch took with what lay unused in its cache."""
    if device.type != "cuda":
        return {"allocated_gb": None, "peak_gb": None}
    taken = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_gb": taken[0] / 1e9, "peak_gb": taken[1] / 1e9}


def finetune(folder: Path, run: Path, options: argparse.Namespace, *flags: str) -> Row:
    """Run ``samo finetune``; return its median step after the first."""
    arguments = [str(folder), "--data", str(folder.parent / "text.txt"), "--out", str(run)]
    sizes = {"steps": options.steps, "batch-size": options.batch_size, "context": options.context}
    fixed = {"weights": "streamed", "state": "lean", "dtype": "bfloat16", "log-every": 1}
    rare = {"eval-every": options.steps, "save-every": options.steps, "sample-tokens": 0}
    for name, value in (sizes | fixed | rare).items():
        arguments += [f"--{name}", str(value)]
    status = cli(["finetune", *arguments, *flags])
    if status:
        raise RuntimeError(f"samo finetune ended with {status}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    shutil.rmtree(run)  # it is larger than the model
    step_ms = statistics.median(step["step_ms"] for step in steps[1:])
    return {"step_ms": step_ms, "loss": steps[-1]["loss"]}


def train_here(options: argparse.Namespace, device: torch.device, freezes: bool) -> Row:
    """Train with the library, as ``samo finetune`` does."""
    model = random_model(options, device)
    if freezes:
        freeze_embeddings_(model)
    opt = samo.AdamW(samo.param_groups(model, lr=1e-5), state="lean")
    return take_steps(model, opt, options, device)


def train_dense(library: str, options: argparse.Namespace, device: torch.device) -> Row:
    """Train the dense model in bfloat16 with an optimizer of another project."""
    places = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
    module = peer(places.get(library, library))
    with device:
        model: Any = AutoModelForCausalLM.from_config(config_of(options), dtype=torch.bfloat16)
    kind = module.FlashAdamW if library == "flashoptim" else module.AdamW8bit
    return take_steps(model, kind(model.parameters(), lr=1e-5), options, device)


def take_steps(
    model: Any, opt: torch.optim.Optimizer, options: argparse.Namespace, device: torch.device
) -> Row:
    """Train on random bytes; return the median step after the first."""
    checkpoint_blocks(model)
    samo.chunk_loss_(model.train())
    tokens = torch.randint(0, 256, (options.batch_size, options.context), device=device)
    times, loss = [], 0.0
    for _ in range(options.steps):
        started = time.perf_counter()
        out = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        out.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        loss = float(out.detach())  # waits for the device
        times.append((time.perf_counter() - started) * 1e3)
    return {"step_ms": statistics.median(times[1:]), "loss": loss}


def main() -> None:
    """Print and write one row per contender."""
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shape", choices=sorted(PUBLIC))
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--limit-gb", type=float, help="of GPU memory, for samo")
    parser.add_argument("--peers", nargs="*", default=[], help="flashoptim, bitsandbytes, torchao")
    parser.add_argument("--in-python", action="store_true", help="do not use samo finetune")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="for the model; by default one that is removed")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.batch_size, options.context = 3, 2, 32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limit = None if options.limit_gb is None else options.limit_gb * 1e9
    rows = list[Row]()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place) / "model"
        if not options.in_python:
            write_model(folder, options, device)
            size = (options.steps + 8) * options.batch_size * (options.context + 1)
            text = "".join(chr(32 + int(one)) for one in torch.randint(0, 95, (size,)))
            (folder.parent / "text.txt").write_text(text)
        for freezes in (False, True):
            name = "samo, embeddings frozen" if freezes else "samo"
            run = Path(place) / f"run-{freezes:d}"
            flags = ["--freeze-embeddings"] if freezes else []
            with limited(limit, device):
                if options.in_python:
                    row = measured(name, options, device, train_here, options, device, freezes)
                else:
                    row = measured(name, options, device, finetune, folder, run, options, *flags)
            rows.append(row)
    for library in options.peers:
        with limited(None, device):
            rows.append(measured(library, options, device, train_dense, library, options, device))
    show(rows, COLUMNS)
    write_rows(options.out, rows)


def measured(name: str, options: Any, device: torch.device, run: Any, *args: Any) -> Row:
    """Return a row; what does not fit has an error in it."""
    row: Row = {"contender": name, "shape": options.shape, "sparsity": options.sparsity}
    row |= {"batch_size": options.batch_size, "context": options.context, "error": None}
    try:
        row |= run(*args)
        row["tokens_per_s"] = options.batch_size * options.context / row["step_ms"] * 1e3
    except (torch.OutOfMemoryError, UnavailableError, RuntimeError) as error:
        row["error"] = str(error).split("\n")[0][:200]
    return row | peaks_gb(device)


if __name__ == "__main__":
    main()
