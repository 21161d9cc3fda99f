"""The ledger: predictions, measurements, and an independent walk over all tensors."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import samo
from samo.memory.ledger import Ledger, Share
from samo.memory.predict import KINDS, TensorSpec, dense_bytes, paper_bytes, predict, total
from samo.models.gpt import GPT, GPTConfig
from tests.meters import live_storages, small_gpt, tokens
from tests.ranks import run_ranks


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


@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_measured_equals_predicted(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    model = small_gpt()
    count = sum(param.numel() for param in model.parameters())
    account = samo.ledger(model, trained(model, dtype, grad_dtype=grad_dtype))
    assert_as_predicted(account)
    assert account.num_params == count


@pytest.mark.parametrize(
    ("settings", "pruned", "unpruned"),
    [
        ({"grad_dtype": torch.bfloat16}, 3.53, 16.06),  # vectors have fp32 gradients
        ({}, 3.73, 18.0),
        ({"value_dtype": torch.bfloat16}, 2.84, 7.03),
    ],
    ids=["bf16 gradients", "fp32 gradients", "lean"],
)
def test_a_gpt_at_90_percent_holds_the_bytes_of_the_table(
    settings: dict[str, Any], pruned: float, unpruned: float
) -> None:
    model = GPT(GPTConfig(num_layers=2, width=256, num_heads=4, vocab_size=331))
    account = samo.ledger(model, trained(model, torch.bfloat16, **settings))
    assert_as_predicted(account)
    share = account.pruned
    assert round(sum(share.measured.values()) / share.num_params, 2) == pruned
    assert share.paper / share.num_params == pytest.approx(4.4, abs=0.01)
    assert share.dense / share.num_params == 20
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


def test_before_the_first_step_only_what_exists_is_measured() -> None:
    model = small_gpt()
    with pytest.raises(samo.CompressionError, match="the model is not compressed"):
        samo.ledger(model)
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    account = samo.ledger(model)
    assert account.pruned.measured["dense"] == account.pruned.predicted["dense"] > 0
    assert account.pruned.measured["gradients"] == 0
    assert account.pruned.predicted["gradients"] > 0
    assert account.pruned.predicted["moments"] == 0
    with_opt = samo.ledger(model, samo.AdamW(model.parameters()))
    assert with_opt.pruned.predicted["moments"] > 0


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "SGD": (lambda params: torch.optim.SGD(params), 0),
    "SGD with momentum": (lambda params: torch.optim.SGD(params, momentum=0.9), 1),
    "Adam": (torch.optim.Adam, 2),
    "AdamW with a third moment": (lambda params: torch.optim.AdamW(params, amsgrad=True), 3),
    "Adadelta": (torch.optim.Adadelta, 2),
    "Adagrad": (torch.optim.Adagrad, 1),
    "Adamax": (torch.optim.Adamax, 2),
    "ASGD": (torch.optim.ASGD, 1),
    "NAdam": (torch.optim.NAdam, 2),
    "RAdam": (torch.optim.RAdam, 2),
    "RMSprop": (lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True), 3),
    "Rprop": (torch.optim.Rprop, 2),
    "samo.AdamW": (samo.AdamW, 2),
}


class Scaled(nn.Linear):
    """A linear layer with a parameter of no dimension."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_is_predicted_before_its_first_step(kind: str) -> None:
    build, moments = OPTIMIZERS[kind]
    model = nn.Sequential(Scaled(64))
    samo.compress_(model, samo.prune(model, 0.9))
    opt = build(model.parameters())
    before = samo.ledger(model, opt)
    assert "moments from the first step" in str(before)
    model(torch.randn(2, 64)).sum().backward()
    opt.step()
    account = samo.ledger(model, opt)
    assert account.pruned.predicted == before.pruned.predicted
    assert_as_predicted(account)
    assert account.pruned.measured["moments"] == 4 * 410 * moments
    assert account.dense_bytes == (8 + 4 * moments) * (4096 + 64 + 1)
    saved = 1 - account.measured_bytes / account.dense_bytes
    assert f"saved against dense: {saved:.1%}" in str(account)


@pytest.mark.parametrize("build", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_what_an_unknown_optimizer_keeps_is_unknown_until_its_first_step(build: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    samo.compress_(model, samo.prune(model, 0.9))
    opt, name, x = build(model.parameters()), build.__name__, torch.randn(8, 64)
    account = samo.ledger(model, opt)
    assert account.unknown == (name,)
    assert f"state of {name}: unknown until the first step" in str(account)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    account = samo.ledger(model, opt)
    if build is torch.optim.Adafactor:
        assert account.unknown == ()
        assert_as_predicted(account)
    told = sum(account.pruned.measured.values()) + account.other_bytes
    assert told > account.pruned.measured["dense"] + 3 * 4 * 410
    assert account.dense_bytes is None  # on matrices it would keep something else
    assert "dense training" not in str(account)


def test_several_optimizers_are_one_account() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    samo.compress_(model, samo.prune(model, 0.9), dtype=torch.bfloat16)
    opts = [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        samo.AdamW(model[1].parameters()),
    ]
    model(torch.randn(2, 64, dtype=torch.bfloat16)).float().sum().backward()
    for opt in opts:
        opt.step()
    account = samo.ledger(model, opts)
    assert_as_predicted(account)
    assert account.optimizers == ("SGD", "AdamW")
    assert account.pruned.measured["moments"] == (4 + 8) * 410
    assert account.dense_bytes == (16 + 20) * 4160


def test_ages_and_the_table_of_their_corrections_are_counted() -> None:
    model = small_gpt()
    masks = samo.prune(model, 0.9)
    samo.compress_(model, masks)
    opt = samo.AdamW(model.parameters(), entry_steps=True, betas=(0.87, 0.998))
    step(model, opt)
    account = samo.ledger(model, opt)
    assert_as_predicted(account)
    assert account.pruned.measured["ages"] == 2 * masks.kept
    assert account.unpruned.measured["ages"] == 0
    assert account.other_bytes >= 2 * 8 * 2**15


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


def wrap(rank: int, num_ranks: int) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    for is_view in (False, True):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 7))
        masks = samo.prune(model, 0.9)
        samo.compress_(model, masks)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=is_view)
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        ddp(torch.randn(2, 64)).sum().backward()
        opt.step()
        account = samo.ledger(ddp, opt)
        assert_as_predicted(account)
        buckets = account.pruned.measured["buckets"] + account.unpruned.measured["buckets"]
        held = sum(map(int, ddp._get_ddp_logging_data()["bucket_sizes"].split(",")))
        assert buckets == (0 if is_view else held)
        moments = torch.tensor(float(account.pruned.measured["moments"]))
        dist.all_reduce(moments)
        assert int(moments) == 8 * masks.kept  # each rank has its own part


def test_buckets_of_ddp_and_shards_of_zero_are_counted() -> None:
    run_ranks(2, wrap)


def test_json_and_table_show_the_whole_account() -> None:
    model = small_gpt()
    account = samo.ledger(model, trained(model, torch.bfloat16))
    loaded = json.loads(account.to_json())
    assert loaded["measured_bytes"] == account.measured_bytes
    assert loaded["pruned"]["measured"] == account.pruned.measured
    assert loaded["unpruned"]["dense"] == account.unpruned.dense
    assert loaded["optimizers"] == ["AdamW"]
    text = str(account)
    assert "pruned, 82,944 parameters" in text
    assert "unpruned, 34,704 parameters" in text
    assert "SAMO paper, 16-bit" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("large", "small", "unit", "shown"),
    [
        (7 * 10**9, 6 * 10**6, "GB (10^9", "7.01"),
        (7 * 10**9, 10**5, "MB (10^6", "7,000.10"),
        (1640, 60, "kB (10^3", "1.70"),
        (60, 1, "kB (10^3", "0.06"),
    ],
)
def test_the_unit_of_the_table_is_the_largest_that_shows_every_row(
    large: int, small: int, unit: str, shown: str
) -> None:
    def share(size: int) -> Share:
        held = {**dict.fromkeys(KINDS, 0), "values": size}
        return Share(num_params=1, measured=held, predicted=held, dense=size, paper=size)

    text = str(Ledger(pruned=share(large), unpruned=share(small), other_bytes=0, buffer_bytes=0))
    assert text.startswith(unit)
    assert f"all                   {shown:>12}" in text


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({"grad_dtype": "bfloat16"}, (2.129, 14)),
        ({}, (2.129, 16)),
        ({"dtype": "float16"}, (2.129, 16)),
        ({"dtype": "float32"}, (4.129, 16)),
        ({"dtype": "float64"}, (8.129, 32)),
        ({"value_dtype": "bfloat16", "is_lean": True}, (2.137, 7)),
        ({"has_ages": True}, (2.129, 18)),
        ({"moments": 0, "optimizer": "torch"}, (2.129, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("density", [0.1, 0.2])
def test_bytes_a_parameter_follow_the_formula(
    settings: dict[str, Any], formula: tuple[float, float], density: float
) -> None:
    numel = 10_000_000
    spec = TensorSpec(numel=numel, kept=round(numel * density), **settings)
    expected = formula[0] + formula[1] * density
    assert sum(predict(spec).values()) / numel == pytest.approx(expected, abs=5e-4)
    assert paper_bytes(spec) / numel == pytest.approx(2 + 24 * density)


def test_totals_and_buckets() -> None:
    specs = [TensorSpec(numel=100, kept=10), TensorSpec(numel=50, kept=None, is_trained=False)]
    assert predict(specs[0], has_buckets=True)["buckets"] == predict(specs[0])["gradients"] == 40
    assert sum(total(specs).values()) == sum(sum(predict(spec).values()) for spec in specs)
    assert [dense_bytes(spec) for spec in specs] == [2000, 100]
    assert [paper_bytes(spec) for spec in specs] == [440, 100]
    assert dense_bytes(TensorSpec(numel=10, kept=1, dtype="float32")) == 160


def test_prediction_and_bitmap_agree_on_the_layout() -> None:
    for numel in (1, 63, 64, 65, 2048, 2049, 1_000_003):
        mask = samo.Mask.from_bool(torch.ones(numel, dtype=torch.bool))
        assert predict(TensorSpec(numel=numel, kept=numel))["bitmap"] == mask.nbytes


def test_a_spec_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"dtype must be the name of one of bfloat16, .* got 'int8'"
    ):
        TensorSpec(numel=1, kept=None, dtype="int8")


def test_a_rank_holds_its_share_of_all_but_the_bitmap() -> None:
    whole = predict(TensorSpec(numel=4096, kept=400, is_resident=False))
    part = predict(TensorSpec(numel=4096, kept=400, is_resident=False, held=100))
    assert part["bitmap"] == whole["bitmap"] > 0
    assert all(part[kind] == whole[kind] / 4 for kind in part if kind != "bitmap")
    assert dense_bytes(TensorSpec(numel=4096, kept=400, held=100)) == 20 * 1024
    assert predict(TensorSpec(numel=30, kept=None, held=0))["values"] == 0
