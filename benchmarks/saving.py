"""How long does training stand still for a checkpoint, and how large is it?

    python -m benchmarks.saving
    python -m benchmarks.saving --shape gpt3-2.7b --batch-size 8 --context 1024

A GPT at 90 %, in bfloat16. As in `samo train`, the memory of copies is taken in a thread after the
first step; `--unprepared` leaves it to the first save. In each round: a step, `samo.save`, and
`samo.async_save` with steps until it is done. The first round is a row of its own.
"""

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import samo
from benchmarks.measure import Row, arguments, show, time_ms, write_rows
from samo.bench.contenders import Samo
from samo.checkpoint import read_manifest
from samo.checkpoint.save import prepare
from samo.checkpoint.tensors import SavedTensors
from samo.models.gpt import GPT, GPTConfig
from samo.models.shapes import SHAPES

DENSE_BYTES = 12
"""Of a checkpoint with fp32 weights and two moments, for each parameter."""


def pruned_bytes(path: Path) -> tuple[int, int]:
    """Return the bytes of pruned tensors in a checkpoint, and those of dense ones."""
    masks, manifest = samo.load_masks(path), read_manifest(path)
    found = sum(mask.words.nbytes for mask in masks.values())
    for kind in ("weights", "optimizer"):
        for name, spec in SavedTensors(manifest, kind).specs.items():
            if name.split("/")[0] in masks:
                found += torch.Size(spec.shape).numel() * spec.dtype.itemsize
    return found, DENSE_BYTES * sum(mask.numel for mask in masks.values())


def main() -> None:
    """Print and write one row for the first round, and one for the others."""
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=[*SHAPES], help="by default 16 layers, width 512")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--unprepared", action="store_true", help="let the first save take memory")
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary folder")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = GPTConfig(num_layers=16, width=512, num_heads=8, context=options.context)
    if options.shape is not None:
        named = SHAPES[options.shape]
        sizes = {"num_layers": named.num_layers, "width": named.width}
        shape = replace(shape, **sizes, num_heads=named.num_heads, vocab_size=50257)
    if options.toy:
        shape = replace(shape, num_layers=1, width=32, num_heads=2)
    with device:
        torch.set_default_dtype(torch.bfloat16)
        model = GPT(replace(shape, is_checkpointed=device.type == "cuda"))
        torch.set_default_dtype(torch.float32)
        tokens = torch.randint(0, 256, (options.batch_size, options.context + 1))
    trained = Samo(model, samo.prune(model, 0.9, method="random"))

    def step() -> None:
        trained.gradients(tokens[:, :-1], tokens[:, 1:])
        trained.update()
        wait(tokens)

    rounds: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        step()
        if not options.unprepared:
            prepare(model, trained.optimizer)
        step()
        for _ in range(2 if options.toy else options.rounds):
            found: Row = {"step_ms": time_ms(step)}
            found["save_ms"] = time_ms(lambda: samo.save(f"{folder}/a", model, trained.optimizer))
            start = time.perf_counter()
            saving = samo.async_save(f"{folder}/a", model, trained.optimizer)
            found["stall_ms"] = 1e3 * (time.perf_counter() - start)
            steps = []
            while not saving.done():
                steps.append(time_ms(step))
            saving.result()
            found["async_ms"] = 1e3 * (time.perf_counter() - start)
            found["step_meanwhile_ms"] = statistics.median(steps) if steps else None
            rounds.append(found)
            print({key: value and round(value, 1) for key, value in found.items()}, flush=True)
        size, dense = pruned_bytes(Path(folder, "a"))
    common = {"params": sum(mask.numel for mask in samo.masks(model).values())}
    common |= {"device": device.type, "pruned_bytes": size, "over_dense": size / dense}
    rows = []
    for name, group in (("first", rounds[:1]), ("later", rounds[1:])):
        row: Row = {"round": name}
        for key in rounds[0]:
            values = [each[key] for each in group if each[key] is not None]
            row[key] = statistics.median(values) if values else None
        row["stall_over_save"] = row["stall_ms"] / row["save_ms"]
        row["stall_over_step"] = row["stall_ms"] / row["step_ms"]
        rows.append(row | common)
    show(rows, [key for key in rows[0] if key != "device"])
    write_rows(options.out, rows)


def wait(tensor: Tensor) -> None:
    """Wait for the kernels of a device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


if __name__ == "__main__":
    main()
