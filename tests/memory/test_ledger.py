"""The ledger: predictions, measurements, and an independent walk over all tensors."""

from typing import Any

import pytest
import torch
from torch import nn

import samo
from samo.memory.ledger import Ledger
from samo.memory.predict import TensorSpec, predict
from samo.models.gpt import GPT, GPTConfig
from samo.utils.formatting import percent
from tests.meters import live_storages, small_gpt, tokens


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    batch = tokens()
    model(batch, batch).backward()
    opt.step()


def trained(model: nn.Module, dtype: torch.dtype, **settings: Any) -> samo.AdamW:
    samo.compress_(model, samo.prune(model, 0.9), dtype=dtype, **settings)
    is_lean = settings.get("value_dtype") is not None
    opt = samo.AdamW(model.parameters(), state="lean" if is_lean else "exact")
    step(model, opt)
    return opt


def assert_as_predicted(account: Ledger) -> None:
    assert account.pruned.measured == account.pruned.predicted
    assert account.unpruned.measured == account.unpruned.predicted


@pytest.mark.parametrize(
    ("dtype", "settings", "pruned", "unpruned", "dense"),
    [
        (torch.bfloat16, {"grad_dtype": torch.bfloat16}, 3.53, 16.06, 20),  # of matrices alone
        (torch.bfloat16, {}, 3.73, 18.0, 20),
        (torch.bfloat16, {"value_dtype": torch.bfloat16}, 2.84, 7.03, 20),
        (torch.float16, {}, 3.73, 18.0, 20),
        (torch.float32, {"grad_dtype": torch.bfloat16}, 5.53, 16.0, 16),
        (torch.float64, {}, 11.33, 32.0, 32),
    ],
    ids=str,
)
def test_a_gpt_at_90_percent_holds_the_bytes_of_the_table(
    dtype: torch.dtype, settings: dict[str, Any], pruned: float, unpruned: float, dense: int
) -> None:
    model = GPT(GPTConfig(num_layers=2, width=256, num_heads=4, vocab_size=331))
    account = samo.ledger(model, trained(model, dtype, **settings))
    assert_as_predicted(account)
    share = account.pruned
    assert round(sum(share.measured.values()) / share.num_params, 2) == pruned
    assert share.paper / share.num_params == pytest.approx(4.4, abs=0.01)
    assert share.dense / share.num_params == dense
    share = account.unpruned
    assert round(sum(share.measured.values()) / share.num_params, 2) == unpruned


@pytest.mark.parametrize("settings", [{}, {"value_dtype": torch.bfloat16}], ids=["exact", "lean"])
def test_a_walk_over_all_live_storages_finds_what_the_ledger_says(settings: Any) -> None:
    before = live_storages()
    model = small_gpt(is_tied=True)
    opt = trained(model, torch.bfloat16, **settings)
    account = samo.ledger(model, opt)
    found = sum(size for key, size in live_storages().items() if key not in before)
    told = account.measured_bytes + account.other_bytes + account.buffer_bytes
    # Both counts of skipped steps, on the device and on the host.
    assert found - told == 32
    assert account.other_bytes < 0.001 * account.measured_bytes


OPTIMIZERS: list[tuple[Any, dict[str, Any], int]] = [
    (torch.optim.SGD, {}, 0),
    (torch.optim.SGD, {"momentum": 0.9}, 1),
    (torch.optim.AdamW, {"amsgrad": True}, 3),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
    (samo.AdamW, {"entry_steps": True}, 2),
    *((getattr(torch.optim, name), {}, 1) for name in ("Adagrad", "ASGD")),
    *((getattr(torch.optim, name), {}, 2) for name in ("Adam", "Adadelta", "Adamax")),
    *((getattr(torch.optim, name), {}, 2) for name in ("NAdam", "RAdam", "Rprop")),
]


@pytest.mark.parametrize(("build", "settings", "moments"), OPTIMIZERS)
def test_any_optimizer_is_predicted_before_its_first_step(
    build: Any, settings: dict[str, Any], moments: int
) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model.scale = nn.Parameter(torch.tensor(0.5))  # of no dimension
    samo.compress_(model, samo.prune(model, 0.9))
    opt = build(model.parameters(), **settings)
    before = samo.ledger(model, opt)
    assert before.pruned.measured["gradients"] == 0
    assert before.pruned.predicted["gradients"] == 4 * 410
    alone = samo.ledger(model)
    assert alone.pruned.predicted["moments"] == 0
    assert "paper" not in str(alone)  # its figure has moments
    assert "paper" in str(before)
    (model(torch.randn(2, 64)).sum() * model.scale).backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert account.pruned.predicted == before.pruned.predicted
    assert_as_predicted(account)
    assert account.pruned.measured["moments"] == 4 * 410 * moments
    assert account.dense_bytes == (8 + 4 * moments) * (4096 + 64 + 1)
    saved = 1 - account.measured_bytes / account.dense_bytes
    assert f"saved against dense: {percent(saved)};" in str(account)


def test_what_an_unknown_optimizer_keeps_is_unknown_until_its_first_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(samo.CompressionError, match="the model is not compressed"):
        samo.ledger(model)
    samo.compress_(model, samo.prune(model, 0.9))
    opt = torch.optim.Adafactor(model.parameters())
    account = samo.ledger(model, opt)
    assert account.unknown == ("Adafactor",)
    assert "state of Adafactor: unknown until the first step" in str(account)
    model(torch.randn(8, 64)).square().mean().backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert account.unknown == ()
    assert_as_predicted(account)
    assert account.pruned.measured["moments"] > 0
    assert account.dense_bytes is None  # on matrices it would keep something else
    assert "dense training" not in str(account)


def test_a_model_without_memory_holds_its_masks_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    masks = {f"{i}.weight": samo.Mask.ones((64, 64)) for i in range(2)}
    account = samo.ledger(samo.compress_(model, samo.Masks(masks)))
    assert account.measured_bytes == account.pruned.measured["bitmap"] == 2 * (4096 // 8 + 16)


def test_several_optimizers_are_one_account() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    one = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    two = samo.AdamW(model[1].parameters())
    model(torch.randn(2, 64, dtype=torch.bfloat16)).float().sum().backward()
    one.step()
    two.step()
    account = samo.ledger(model, [one, two])
    assert_as_predicted(account)
    assert account.pruned.measured["moments"] == (4 + 8) * 410
    assert account.dense_bytes == (16 + 20) * 4160


def test_an_optimizer_that_accelerate_wraps_is_known() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = small_gpt()
    opt = trained(model, torch.bfloat16)
    wrapped = accelerate.Accelerator(cpu=True).prepare(opt)
    assert wrapped is not opt
    assert str(samo.ledger(model, wrapped)) == str(samo.ledger(model, opt))


def test_a_sparse_gradient_is_counted() -> None:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8))
    samo.compress_(model, samo.prune(model, 0.5))
    model(torch.tensor([1, 2])).sum().backward()
    account = samo.ledger(model)
    assert account.unpruned.measured["gradients"] == 2 * 8 + 2 * 8 * 4 + 8 * 4


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    opt = samo.AdamW(model.parameters())
    model(torch.randn(2, 64, dtype=torch.bfloat16)).float().sum().backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert_as_predicted(account)
    assert account.pruned.measured["gradients"] == 4 * 2048
    assert account.unpruned.measured["values"] == 2 * 64 + 4 * 64
    assert account.dense_bytes == 2 * 4160 + 20 * 4160
    model[1].requires_grad_(False)  # what it has learnt with stays
    assert samo.ledger(model, opt).pruned.predicted["moments"] == 8 * 2048


def test_prediction_and_bitmap_agree_on_the_layout() -> None:
    for numel in (1, 63, 64, 65, 2048, 2049, 1_000_003):
        mask = samo.Mask.from_bool(torch.ones(numel, dtype=torch.bool))
        assert predict(TensorSpec(numel=numel, kept=numel))["bitmap"] == mask.nbytes


def test_a_rank_holds_its_share_of_all_but_the_bitmap() -> None:
    whole = predict(TensorSpec(numel=4096, kept=400, is_resident=False))
    part = predict(TensorSpec(numel=4096, kept=400, is_resident=False, held=100))
    assert part["bitmap"] == whole["bitmap"] > 0
    assert all(part[kind] == whole[kind] / 4 for kind in part if kind != "bitmap")
    dense = predict(TensorSpec(numel=4096, kept=400, held=100), "dense")
    assert sum(dense.values()) == 20 * 1024
    assert predict(TensorSpec(numel=30, kept=None, held=0))["values"] == 0
