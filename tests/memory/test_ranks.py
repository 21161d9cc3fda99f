"""Each rank holds what its ledger says, and never the weights of another stage, even while it is built."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import samo
from samo.models.gpt import GPT, GPTConfig, draw_weights
from samo.pipeline.split import check_cuts, take_apart
from tests.meters import LiveBytes, live_storages
from tests.pipeline.cases import next_token_loss
from tests.ranks import run_ranks

CONFIG = GPTConfig(num_layers=4, width=64, num_heads=2, context=4, vocab_size=96)
TIMEOUT = 20


def on_meta(config: GPTConfig = CONFIG) -> GPT:
    with torch.device("meta"):
        return GPT(config)


# Measured on ranks

Case = tuple[int, str, int]
"""Ranks of the pipeline, state of the optimizer, stages on each rank."""
CASES: list[Case] = [(1, "exact", 1), (2, "lean", 1), (2, "sgd", 2), (4, "exact", 1)]


def types_for(state: str) -> dict[str, Any]:
    values = torch.bfloat16 if state == "lean" else None
    return {"dtype": torch.bfloat16, "value_dtype": values}


def hold() -> list[dict[str, int]]:
    """Train one step and return what this rank holds, by the ledger and by a walk over all tensors."""
    found = []
    gc.collect()
    gc.freeze()  # a walk then passes over what was there at the start
    for pipe, state, per_rank in CASES:
        before = live_storages()
        mesh = samo.mesh(pipe=pipe)
        pipeline = samo.Pipeline(
            on_meta(), next_token_loss, mesh, 2, stages_per_rank=per_rank, timeout_s=TIMEOUT
        )
        module = pipeline.module
        samo.compress_(module, samo.prune(module, 0.9), **types_for(state))
        opt = (
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            if state == "sgd"
            else samo.AdamW(module.parameters(), state=state)
        )
        tokens_BT = torch.tensor([[3], [5]])  # so that what waits for messages is small
        pipeline.step(tokens_BT, target=tokens_BT)
        opt.step()
        account = samo.ledger(module, opt)
        for _ in range(40):  # threads of gloo hold what they have sent a moment longer
            walk = sum(size for key, size in live_storages().items() if key not in before)
            if walk < 1.01 * account.measured_bytes:
                break
            time.sleep(0.05)
        pipeline.close()
        found.append(
            {
                "measured": account.measured_bytes,
                "predicted": account.predicted_bytes,
                "walk": walk,
            }
        )
        del pipeline, module, opt, account
    return found


def build(folder: Path) -> list[tuple[str, int, int, int]]:
    """Build a stage in all ways, and return own bytes, their largest tensor and the peak of each."""
    mesh, found = samo.mesh(pipe=4), []
    layers = [lambda: nn.Linear(96, 96) for _ in range(4)]
    ways: dict[str, Callable[[], samo.Pipeline]] = {
        "meta": lambda: samo.Pipeline(on_meta(), next_token_loss, mesh, 2, timeout_s=TIMEOUT),
        "functions": lambda: samo.Pipeline(
            layers, nn.functional.mse_loss, mesh, 2, timeout_s=TIMEOUT
        ),
        "files": lambda: samo.Pipeline(
            on_meta(), next_token_loss, mesh, 2, weights=folder, timeout_s=TIMEOUT
        ),
    }
    for name, way in ways.items():
        with LiveBytes() as meter:
            pipeline = way()
        sizes = [param.nbytes for param in pipeline.module.parameters()]
        found.append((name, sum(sizes), max(sizes), meter.peak_bytes))
        pipeline.close()
    return found


def hold_and_build(rank: int, num_ranks: int, folder: Path) -> Any:
    return hold(), build(folder)


@pytest.mark.slow
def test_a_rank_holds_what_its_ledger_says_and_never_the_weights_of_another_stage(
    tmp_path: Path,
) -> None:
    with LiveBytes() as meter:
        whole = GPT(CONFIG)
    bytes_of_all = sum(param.nbytes for param in whole.parameters())
    assert meter.peak_bytes >= bytes_of_all, "the meter sees weights"
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    for rank, (found, stages) in enumerate(run_ranks(4, hold_and_build, tmp_path)):
        for (pipe, state, per_rank), held in zip(CASES, found, strict=True):
            case = f"{pipe}x{4 // pipe} {state} {per_rank} rank {rank}"
            assert held["measured"] == held["predicted"] > 0, case
            assert held["walk"] == pytest.approx(held["measured"], rel=0.01), case
        for name, own, largest, peak in stages:
            # One tensor more while its values are drawn or read, and flags of a few entries.
            assert own <= peak <= own + largest + 2000, name
            assert peak < 0.5 * bytes_of_all


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_that_draws_the_weights_of_one_process_holds_one_block_and_one_table_more(
    is_tied: bool,
) -> None:
    config = GPTConfig(
        num_layers=6, width=32, num_heads=2, context=8, vocab_size=700, is_tied=is_tied
    )
    layers = take_apart(on_meta(config))
    block = sum(param.nbytes for _, param in layers.units[1].named_parameters())
    table = 4 * 700 * 32
    for start, stop in check_cuts(None, layers, 4):
        own = {n for unit in layers.units[start:stop] for n, _ in unit.named_parameters()}
        own |= {name for group in layers.tied if own & {*group} for name in group}
        with LiveBytes() as meter:
            drawn = draw_weights(config, own.__contains__)
        held = sum(values.nbytes for values in drawn.values())
        assert meter.peak_bytes <= held + block + table + 2000
