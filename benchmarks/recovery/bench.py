"""What does pruning cost a real language model, and how much does training it again bring back?

    python -m benchmarks.recovery.bench MODEL_DIR --train train.txt --valid valid.txt \
        --tokens 5000000 --out rows.jsonl

Every cell is a method and a sparsity. The perplexity on held-out text is measured for the model as it
came, pruned, and after training on the same batches with the same schedule:

dense       the model as it came
unpruned    the dense model, all weights: what the text alone brings
samo        all kept weights of the pruned model
distilled   the same, with the dense model as a teacher
lora        the pruned model frozen, adapters of rank 16 on all its linear layers; these are dense

Models compute in bfloat16 on a GPU, and by default in float32 on a CPU.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import samo
from benchmarks.measure import Row, arguments, held_bytes, is_installed, show
from samo.bench.rows import environment
from samo.bench.timing import free
from samo.data.batches import Batch, Batches, validation_batches
from samo.data.tokenizers import open_tokenizer
from samo.data.tokens import Tokens, open_tokens
from samo.integrations.chunk_loss import Distillation, deferred_logits
from samo.integrations.model_folders import open_model
from samo.pruning.prune import prune

CONTENDERS = ("dense", "unpruned", "samo", "distilled", "lora")
COLUMNS = ["method", "sparsity", "contender", "tokens", "lr", "pruned_ppl", "ppl", "tokens_per_s"]
COLUMNS += ["state_bytes", "peak_bytes"]
WARM_UP = 3
"""Steps that do not count for the speed."""


class Job(NamedTuple):
    """What all contenders share."""

    folder: Path
    train: Tokens
    valid: Tokens
    options: argparse.Namespace
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        is_bf16 = self.device.type == "cuda" or self.options.bf16
        return torch.bfloat16 if is_bf16 else torch.float32

    def open(self) -> nn.Module:
        """Return the model as it came, in fp32."""
        return open_model(self.folder, dtype=torch.float32).to(self.device)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Return training batches without end."""
        options = self.options
        return Batches(
            self.train, context=options.context, batch_size=options.batch_size, seed=seed
        )

    def autocast(self) -> torch.autocast:
        """Compute fp32 models in the dtype of the others."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


@torch.no_grad()
def perplexity(model: nn.Module, job: Job) -> float:
    """Return the perplexity of a model on the held-out text."""
    options, total, count = job.options, 0.0, 0
    model.eval()
    for batch in validation_batches(
        job.valid,
        context=options.context,
        batch_size=options.batch_size,
        max_batches=options.eval_batches,
    ):
        with job.autocast():
            total += float(loss_of(model, *on_device(batch, job))) * batch.num_tokens
        count += batch.num_tokens
    return math.exp(total / count)


def on_device(batch: Batch, job: Job) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a batch on the job's device."""
    return batch.inputs_BT.to(job.device), batch.targets_BT.to(job.device)


def loss_of(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, **kwargs: Any) -> Tensor:
    """Return the mean loss of a batch."""
    loss: Tensor = model(
        input_ids=inputs_BT,
        labels=targets_BT,  # only to ask for a loss: they are shifted already
        shift_labels=targets_BT,
        use_cache=False,
        **kwargs,
    ).loss
    return loss


Pass = Callable[[Tensor, Tensor], Tensor]
"""Computes the loss of inputs and targets, and its gradients."""


def recorded(run: Pass, opt: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Pass:
    """Record a pass as a CUDA graph: the host takes longer to launch this model than the GPU to run it.

    Gradients stay where the recording puts them, and each replay writes them anew.
    """
    static = tuple(tensor.clone() for tensor in batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries set themselves up
            run(*static)
            opt.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run(*static)

    def replay(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        for target, source in zip(static, (inputs_BT, targets_BT)):
            target.copy_(source)
        graph.replay()
        return loss

    return replay


def fit(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    job: Job,
    *,
    lr: float,
    extra: Callable[[Tensor], dict[str, Any]] = lambda inputs_BT: {},
) -> Row:
    """Train on the tokens asked for, with a cosine schedule; return what it took."""
    options = job.options
    steps = max(1, options.tokens // (options.batch_size * options.context))
    warmup, batches = max(1, steps // 20), job.batches(seed=1)
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    started = counted = time.perf_counter()
    state = 0
    model.train()

    def compute(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with job.autocast():
            loss = loss_of(model, inputs_BT, targets_BT, **extra(inputs_BT))
        loss.backward()
        return loss.detach()

    run: Pass = compute
    is_recorded = job.device.type == "cuda" and not options.eager
    if is_recorded:
        run = recorded(compute, opt, on_device(next(job.batches(seed=1)), job))
    for step in range(1, steps + 1):
        rate = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        for group in opt.param_groups:
            group["lr"] = lr * min(rate, step / warmup)
        loss = run(*on_device(next(batches), job))
        nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
        opt.step()
        state = state or held_bytes(model, opt)
        if not is_recorded:
            opt.zero_grad()
        if step == WARM_UP or step % max(1, steps // 20) == 0:
            print(f"    step {step:,} of {steps:,}: loss {float(loss):.3f}", flush=True)
        if step == WARM_UP:
            counted = time.perf_counter()
    size = options.batch_size * options.context
    last = float(loss)  # waits for the device
    now = time.perf_counter()
    row: Row = {"steps": steps, "tokens": steps * size, "lr": lr, "loss": last}
    row |= {"seconds": now - started, "state_bytes": state, "peak_bytes": None}
    row["tokens_per_s"] = (steps - WARM_UP) * size / (now - counted) if steps > WARM_UP else None
    if job.device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(job.device)
    return row | {"ppl": perplexity(model, job)}


def train_unpruned(model: nn.Module, job: Job) -> Row:
    """Train all weights of the dense model."""
    opt = torch.optim.AdamW(samo.param_groups(model, lr=1.0, weight_decay=0.01), fused=True)
    return fit(model, opt, job, lr=job.options.dense_lr)


def train_samo(model: nn.Module, masks: samo.Masks, job: Job, *, distills: bool) -> Row:
    """Train the kept weights of a pruned model, with the dense one as a teacher if asked."""
    is_bf16 = job.dtype == torch.bfloat16
    grad_dtype = torch.bfloat16 if is_bf16 else None
    samo.compress_(model, masks, dtype=job.dtype, grad_dtype=grad_dtype)
    opt = samo.AdamW(samo.param_groups(model, lr=1.0, weight_decay=0.01))
    if not distills:
        return fit(model, opt, job, lr=job.options.lr)
    teacher = job.open().to(job.dtype).requires_grad_(False).eval()
    samo.chunk_loss_(teacher)

    def goal(inputs_BT: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            logits = deferred_logits(teacher, input_ids=inputs_BT, use_cache=False)
        return {"distillation": Distillation(logits, share=0.5, temperature=2.0)}

    return fit(samo.chunk_loss_(model), opt, job, lr=job.options.lr, extra=goal)


def train_lora(model: nn.Module, job: Job) -> Row:
    """Train adapters on a pruned model that stays as it is."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    own = [param for param in model.parameters() if param.requires_grad]
    opt = torch.optim.AdamW(own, lr=1.0, weight_decay=0.0, fused=True)
    return fit(model, opt, job, lr=job.options.lora_lr)


def run(job: Job, out: Path | None) -> list[Row]:
    """Measure every cell; rows are written as they come."""
    options, rows = job.options, list[Row]()

    def add(row: Row) -> None:
        free(job.device)  # other processes may share the GPU
        rows.append({"model": job.folder.name, **row})
        print({key: row.get(key) for key in COLUMNS if row.get(key) is not None}, flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                file.write(json.dumps(rows[-1] | environment(job.device)) + "\n")

    model = job.open()
    if "dense" in options.contenders:
        add({"contender": "dense", "ppl": perplexity(model, job)})
    if "unpruned" in options.contenders:
        add({"contender": "unpruned", **train_unpruned(model, job)})
    for method in options.methods:
        for sparsity in options.sparsities:
            cell: Row = {"method": method, "sparsity": sparsity}
            model = job.open()
            started = time.perf_counter()
            masks = prune(model, sparsity, method=method, **calibration(method, job))
            masks.apply_(model)
            seconds = time.perf_counter() - started
            pruned = perplexity(model, job)
            add(cell | {"contender": "pruned", "ppl": pruned, "seconds": seconds})
            cell["pruned_ppl"] = pruned
            weights = {name: value.cpu() for name, value in model.state_dict().items()}
            for contender in options.contenders:
                model = job.open()
                model.load_state_dict(weights)
                torch.manual_seed(0)  # of adapters
                if contender == "lora" and is_installed("peft"):
                    add(cell | {"contender": contender, **train_lora(model, job)})
                elif contender in ("samo", "distilled"):
                    distills = contender == "distilled"
                    found = train_samo(model, masks, job, distills=distills)
                    add(cell | {"contender": contender, **found})
    return rows


def calibration(method: str, job: Job) -> dict[str, Any]:
    """Return the calibration data of methods that need some: windows of the training text."""
    if method == "magnitude":
        return {}
    batches = job.batches(seed=2)
    count = -(-job.options.samples // job.options.batch_size)
    return {"calibration": [next(batches).inputs_BT for _ in range(count)]}


def main() -> None:
    """Print and write one row per contender and cell."""
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder with its tokenizer")
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="text files")
    parser.add_argument("--valid", type=Path, nargs="+", required=True, help="held-out text files")
    parser.add_argument("--methods", nargs="*", default=["magnitude", "wanda", "sparsegpt"])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.5, 0.6, 0.7, 0.8])
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--tokens", type=int, default=5_000_000, help="to train on, per contender")
    # Rates: the best of a million tokens.
    parser.add_argument("--lr", type=float, default=1e-3, help="of pruned models")
    parser.add_argument("--dense-lr", type=float, default=3e-4)
    parser.add_argument("--lora-lr", type=float, default=3e-3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on")
    parser.add_argument("--eval-batches", type=int, default=40)
    parser.add_argument("--eager", action="store_true", help="record no CUDA graph")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 on a CPU too")
    parser.add_argument("--cache", type=Path, default=Path(".cache/recovery"), help="for tokens")
    options = parser.parse_args()
    if options.toy:
        options.tokens, options.context, options.batch_size, options.samples = 512, 32, 4, 8
        options.eval_batches = 2
    tokenizer = open_tokenizer(str(options.folder))
    train = open_tokens(options.train, tokenizer=tokenizer, cache=options.cache)
    valid = open_tokens(options.valid, tokenizer=tokenizer, cache=options.cache)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    show(run(Job(options.folder, train, valid, options, device), options.out), COLUMNS)


if __name__ == "__main__":
    main()
