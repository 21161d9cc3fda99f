"""The ledger: what is predicted, what is measured, and what an independent walk finds."""

import json

import pytest
import torch
from torch import nn

import samo
from samo.memory.ledger import Ledger, Share
from samo.memory.predict import KINDS, TensorSpec, dense_bytes, paper_bytes, predict, total
from samo.models import GPT, GPTConfig
from tests.meters import live_storages, small_gpt, tokens


def trained(
    model: nn.Module, dtype: torch.dtype, grad_dtype: torch.dtype | None = None
) -> samo.AdamW:
    samo.compress_(model, samo.prune(model, 0.9), dtype=dtype, grad_dtype=grad_dtype)
    if dtype == torch.float16:
        samo.LossScaler(model, init_scale=1.0)
    opt = samo.AdamW(samo.parameters(model))
    batch = tokens()
    model(batch, batch).backward()
    opt.step()
    return opt


@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=["16-bit sums", "fp32 sums"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_measured_equals_predicted(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    model = small_gpt()
    opt = trained(model, dtype, grad_dtype if dtype.itemsize == 2 else None)
    account = samo.ledger(model, opt)
    assert account.pruned.measured == account.pruned.predicted
    assert account.unpruned.measured == account.unpruned.predicted
    assert account.num_params == sum(param.numel() for param in model.parameters())


def test_a_gpt_at_90_percent_in_bf16_holds_3_33_bytes_a_pruned_parameter() -> None:
    model = GPT(GPTConfig(num_layers=2, width=256, num_heads=4, vocab_size=331))
    account = samo.ledger(model, trained(model, torch.bfloat16))
    pruned = account.pruned
    assert sum(pruned.measured.values()) / pruned.num_params <= 3.33
    assert pruned.paper / pruned.num_params == pytest.approx(4.4, abs=0.01)
    assert pruned.dense / pruned.num_params == 20
    assert abs(account.measured_bytes / account.predicted_bytes - 1) < 0.001
    unpruned = account.unpruned
    assert sum(unpruned.measured.values()) / unpruned.num_params == 14


def test_a_walk_over_all_live_storages_finds_what_the_ledger_says() -> None:
    before = live_storages()
    model = small_gpt(is_tied=True)
    opt = trained(model, torch.bfloat16)
    account = samo.ledger(model, opt)
    found = sum(size for key, size in live_storages().items() if key not in before)
    told = account.measured_bytes + account.other_bytes + account.buffer_bytes
    # The count of skipped steps and the optimizer's other scalars are a few bytes.
    assert abs(found - told) <= 16
    assert account.other_bytes < 0.001 * account.measured_bytes


def test_before_the_first_step_only_what_exists_is_measured() -> None:
    model = small_gpt()
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    account = samo.ledger(model)
    assert account.pruned.measured["gradients"] == 0
    assert account.pruned.predicted["gradients"] > 0
    assert account.pruned.predicted["moments"] == 0
    with_opt = samo.ledger(model, samo.AdamW(samo.parameters(model)))
    assert with_opt.pruned.predicted["moments"] > 0


def test_another_optimizer_is_accounted_by_what_it_keeps() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.prune(model, 0.9))
    opt = torch.optim.SGD(samo.parameters(model), lr=0.1, momentum=0.9)
    model(torch.randn(2, 64)).sum().backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert account.pruned.measured["moments"] == 4 * 410 == account.pruned.predicted["moments"]


def test_frozen_parameters_hold_weights_and_bitmap_only() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    samo.compress_(model, samo.prune(model, 0.5), dtype=torch.bfloat16)
    opt = samo.AdamW(samo.parameters(model))
    model(torch.randn(2, 64, dtype=torch.bfloat16)).float().sum().backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert account.pruned.measured == account.pruned.predicted
    assert account.pruned.measured["rest"] == 2 * 2048
    assert account.dense_bytes == 2 * 4160 + 20 * 4160


def test_json_carries_the_whole_account() -> None:
    model = small_gpt()
    account = samo.ledger(model, trained(model, torch.bfloat16))
    loaded = json.loads(account.to_json())
    assert loaded["measured_bytes"] == account.measured_bytes
    assert loaded["pruned"]["measured"] == account.pruned.measured
    assert loaded["unpruned"]["dense"] == account.unpruned.dense


def test_the_table_shows_both_shares() -> None:
    model = small_gpt()
    text = str(samo.ledger(model, trained(model, torch.bfloat16)))
    assert "pruned, 82,944 parameters" in text
    assert "unpruned, 34,704 parameters" in text
    assert "SAMO paper, 16-bit" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("width", "unit", "weights"), [(8, "kB (10^3 bytes)", "0.26"), (640, "MB (10^6 bytes)", "1.64")]
)
def test_the_unit_of_the_table_is_one_in_which_no_row_is_0(
    width: int, unit: str, weights: str
) -> None:
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    samo.compress_(model, samo.prune(model, 0.9))
    model(torch.ones(1, width)).sum().backward()
    lines = str(samo.ledger(model)).splitlines()
    assert lines[0].startswith(unit)
    assert lines[2].split()[-3:-1] == [weights, weights]
    assert not any(" 0.00 " in line for line in lines)


def test_large_models_are_in_gb_unless_a_row_is_too_small_for_it() -> None:
    def share(size: int) -> Share:
        held = {**dict.fromkeys(KINDS, 0), "weights": size}
        return Share(num_params=1, measured=held, predicted=held, dense=size, paper=size)

    for small, unit, shown in ((6 * 10**6, "GB (10^9", "7.01"), (10**5, "MB (10^6", "7,000.10")):
        account = Ledger(
            pruned=share(7 * 10**9), unpruned=share(small), other_bytes=0, buffer_bytes=0
        )
        text = str(account)
        assert text.startswith(unit)
        assert f"all                   {shown:>12}" in text


def test_a_ledger_needs_a_compressed_model() -> None:
    with pytest.raises(samo.CompressionError, match="the model is not compressed"):
        samo.ledger(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "sparsity", "expected"),
    [
        ("bfloat16", "bfloat16", 0.9, 2.129 + 12 * 0.1),
        ("bfloat16", "bfloat16", 0.8, 2.129 + 12 * 0.2),
        ("bfloat16", "float32", 0.9, 2.129 + 14 * 0.1),
        ("float16", "bfloat16", 0.9, 2.129 + 14 * 0.1),
        ("float32", "float32", 0.9, 4.129 + 12 * 0.1),
    ],
)
def test_bytes_a_parameter_follow_the_formula(
    dtype: str, grad_dtype: str, sparsity: float, expected: float
) -> None:
    numel = 10_000_000
    spec = TensorSpec(
        numel=numel, kept=round(numel * (1 - sparsity)), dtype=dtype, grad_dtype=grad_dtype
    )
    assert sum(predict(spec).values()) / numel == pytest.approx(expected, abs=5e-4)
    assert paper_bytes(spec) / numel == pytest.approx(2 + 24 * (1 - sparsity))


def test_totals_add_up() -> None:
    specs = [TensorSpec(numel=100, kept=10), TensorSpec(numel=50, kept=None, is_trained=False)]
    assert sum(total(specs).values()) == sum(sum(predict(spec).values()) for spec in specs)
    assert [dense_bytes(spec) for spec in specs] == [2000, 100]
    assert [paper_bytes(spec) for spec in specs] == [440, 100]
    assert dense_bytes(TensorSpec(numel=10, kept=1, dtype="float32")) == 160


def test_prediction_and_bitmap_agree_on_the_layout() -> None:
    """The prediction imports no torch, and so has its own two constants."""
    for numel in (1, 63, 64, 65, 2048, 2049, 1_000_003):
        mask = samo.Mask.from_bool(torch.ones(numel, dtype=torch.bool))
        assert predict(TensorSpec(numel=numel, kept=numel))["bitmap"] == mask.nbytes


def test_state_that_an_optimizer_keeps_in_lists_is_counted() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.prune(model, 0.9))
    opt = torch.optim.LBFGS(samo.parameters(model), max_iter=4)
    x = torch.randn(8, 64)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert samo.ledger(model, opt).other_bytes > 4 * 4 * (410 + 64)


def test_the_dense_row_has_the_optimizer_of_the_run() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    samo.compress_(model, samo.prune(model, 0.9))
    opt = torch.optim.SGD(samo.parameters(model), lr=0.1, momentum=0.9)
    assert "appear with the first steps" in str(samo.ledger(model, opt))
    model(torch.randn(2, 64)).sum().backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert account.dense_bytes == 12 * 4096
    assert f"saved against dense: {1 - account.measured_bytes / (12 * 4096):.1%}" in str(account)


def test_a_spec_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"dtype must be the name of one of bfloat16, .* got 'int8'"
    ):
        TensorSpec(numel=1, kept=None, dtype="int8")
