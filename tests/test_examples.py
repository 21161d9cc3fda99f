"""The examples run, at smaller sizes than a reader runs them."""

import functools
import importlib.util
import io
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import samo
from tests.meters import ignores_dynamo
from tests.ranks import run_ranks

EXAMPLES: Final = Path(__file__).parents[1] / "examples"


def test_the_minimal_example_prunes_trains_on_and_shows_the_ledger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("minimal", EXAMPLES / "minimal.py")
    assert spec is not None
    assert spec.loader is not None
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    train = minimal.train

    def train_briefly(*args: Any, steps: int) -> None:
        train(*args, steps=steps // 50)

    monkeypatch.setattr(minimal, "train", train_briefly)
    monkeypatch.setattr(minimal, "BATCH", 1)
    minimal.main()
    printed = capsys.readouterr().out
    assert "78,644 of 786,432 weights kept, sparsity 0.900" in printed
    assert printed.count("validation loss") == 3
    assert "pruned, 786,432 parameters" in printed


PRUNED_BYTES: Final = {"ddp.py": "5.73", "fsdp2.py": "0.93"}
"""4.129 + 16f bytes a weight; 0.129 + 16f / 2 on each of two ranks."""


def run_on_a_rank(rank: int, num_ranks: int) -> list[str]:
    """Run the examples in a process that has joined the group already; return what they print."""
    found = []
    for name in (*PRUNED_BYTES, "pipeline.py"):
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=False),
            mock.patch.object(dist, "destroy_process_group") as leave,
            redirect_stdout(io.StringIO()) as printed,
        ):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        leave.assert_called_once_with()
        found.append(printed.getvalue())
    return found


@pytest.mark.slow
def test_examples_train_on_two_ranks_and_show_the_ledger() -> None:
    first, second = run_ranks(2, run_on_a_rank)
    assert second == ["", "", ""]
    for printed, pruned_bytes in zip(first, PRUNED_BYTES.values()):
        check_printed(printed, "on 2 ranks", pruned_bytes)
    # 4.129 + 16f, of one of two stages
    check_printed(first[-1], "on 2 stages", "7.33", num_pruned=81_920)


@pytest.mark.slow
@ignores_dynamo
def test_the_compiled_example_trains_and_shows_the_ledger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor takes a minute; the graph is the same without it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    quick = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda model, mode, **options: quick(model, **options))
    runpy.run_path(str(EXAMPLES / "compiled.py"), run_name="__main__")
    check_printed(capsys.readouterr().out, "compiled", "1.73")  # 0.129 + 16f


def check_printed(printed: str, how: str, pruned_bytes: str, *, num_pruned: int = 98_304) -> None:
    """Check that the loss is below its 5.5 at the start, and the bytes of a pruned weight."""
    line = printed.splitlines()[0]
    assert line.startswith("loss ")
    assert line.endswith(how)
    assert float(line.split()[1].rstrip(",")) < 4
    assert bytes_of_pruned(printed, num_pruned) == pruned_bytes


def bytes_of_pruned(printed: str, num_pruned: int) -> str:
    ledger = printed[printed.index(f"pruned, {num_pruned:,} parameters") :].splitlines()
    return next(row for row in ledger if "together" in row).split()[-1]


FRAMEWORKS: Final = {
    "trainer.py": ("transformers", "by Trainer, step 40", 81_920, "5.33"),
    "accelerated.py": ("accelerate", "by Accelerate", 98_304, "3.73"),
    "lightning_module.py": ("lightning", "by Lightning", 98_304, "3.73"),
    "sft.py": ("trl", "by SFTTrainer", 81_920, "5.33"),
}
"""Packages, what is printed, and bytes: 4.129 + 12f without gradients, 2.129 + 16f in bfloat16."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages, about each other
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_examples_of_frameworks_train_and_show_the_ledger(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, how, num_pruned, pruned_bytes = FRAMEWORKS[name]
    pytest.importorskip(package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    check_printed(printed[printed.index("loss ") :], how, pruned_bytes, num_pruned=num_pruned)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_adapters_merges_what_it_trained(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    found = runpy.run_path(str(EXAMPLES / "lora.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert 4 < float(printed.split()[1]) < 5.5  # a little below its start: the base is random
    assert bytes_of_pruned(printed, 81_920) == "0.33"  # 0.129 + 2f: no gradients, no moments
    assert samo.Masks.from_zeros(found["merged"]) == found["masks"]
