"""The launchers of the Triton kernels: what is launched, chosen and kept between steps.

What the kernels compute is tested with all others in test_kernels.py.
"""

import copy
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import samo
from samo import kernels as _kernels
from samo.kernels import AdamWSettings, AdamWUpdate, choose, dispatch, reference
from samo.mask.mask import Mask
from tests.kernels.cases import KINDS, SETTINGS, State, copy_of, draw_update, tensors_of
from tests.meters import assert_ulps

pytest.importorskip("triton", reason="needs triton")
cuda: Any = pytest.importorskip("samo.kernels.triton_launch", reason="needs triton")
tables: Any = pytest.importorskip("samo.kernels.triton_tables", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATES: list[State] = ["exact", "ages", "lean"]


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["80 --once", pytest.param("90", marks=pytest.mark.long)])
def test_every_kernel_compiles_without_a_gpu(arguments: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", *arguments.split()]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "variants compile" in done.stdout


@pytest.mark.parametrize(
    ("slots", "dtype"),
    [(32, torch.bfloat16), (128, torch.float32), (256, torch.bfloat16), (None, torch.float32)],
    ids=str,
)
def test_all_ways_to_compress_give_the_same(slots: int | None, dtype: torch.dtype) -> None:
    keep = torch.rand(2 * 2048 + 77) < 0.1
    keep[[0, 31, 32, 63, 64, 2046, 2047, 2048, 2079, -1]] = True  # ends of words and blocks
    keep[2100:4000] = False
    mask, dense = Mask.from_bool(keep), torch.randn(keep.numel()).bfloat16()
    out = torch.full((mask.kept,), 7.0, dtype=dtype)
    cuda.launch_compress(slots, dense, mask, out)
    assert torch.equal(out, dense[keep].to(dtype))
    back = torch.full_like(dense, float("nan"))
    cuda.launch_expand(out, mask, back)
    assert torch.equal(back, torch.where(keep, dense, 0.0))


def weights(count: int, state: State = "exact") -> list[AdamWUpdate]:
    """fp32 parameters with bfloat16 copies, every second one pruned, with two rates and decays."""
    pruned = {"density": 0.1, "lr": 0.01, "weight_decay": 0.1}
    unpruned = {"density": None, "lr": 0.02, "weight_decay": 0.0}
    changes = [pruned if index % 2 else unpruned for index in range(count)]
    return [draw_update(300, kind=KINDS[1], state=state, **each) for each in changes]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    kind = type(cuda.triton_adamw.adamw_kernel)
    run = kind.run

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(kind, "run", count)
    return counts


@pytest.mark.parametrize("state", STATES)
def test_launches_do_not_grow_with_the_number_of_weights(
    launches: Counter[str], state: State
) -> None:
    passes = {"adamw_kernel": 2}  # with a copy beside the parameter, and without
    if state == "lean":
        passes = {"adamw_kernel": 1, "adamw_lean_kept_kernel": 1}
    for count in (2, 4):
        launches.clear()
        updates = weights(count, state)
        cuda.find_nonfinite([update.grad for update in updates])
        cuda.adamw_(updates, SETTINGS, torch.tensor(False))
        once = ("find_exponent_kernel", "adamw_scalars_kernel", "expand_rows_kernel")
        assert dict(launches) == dict.fromkeys(once, 1) | passes
        assert all(update.step == 1 for update in updates)


def test_rates_on_the_device_are_read_there(launches: Counter[str]) -> None:
    rates = [torch.tensor(0.01), torch.tensor(0.02, dtype=torch.float64)]
    updates = [update._replace(lr=rates[index // 2]) for index, update in enumerate(weights(4))]
    cuda.adamw_(updates, SETTINGS, None)
    # With a copy to write, and without.
    assert launches == {"adamw_scalars_kernel": 1, "adamw_kernel": 2, "expand_rows_kernel": 1}
    rates[0].fill_(0.0)
    before = [update.param.clone() for update in updates]
    cuda.adamw_(updates, SETTINGS, None)
    same = [torch.equal(update.param, old) for update, old in zip(updates, before)]
    assert same == [True, True, False, False]


def test_tables_are_sent_again_only_when_something_changes() -> None:
    updates, sent = weights(4), tables._sent.cache_info

    def sends(changed: list[AdamWUpdate]) -> int:
        before = sent().misses
        cuda.find_nonfinite([update.grad for update in changed])
        cuda.adamw_(changed, SETTINGS, None)
        return sent().misses - before

    assert sends(updates) > 0
    assert sends(updates) == 0
    moved = [*updates[:3], updates[3]._replace(grad=updates[3].grad.clone())]
    assert sends(moved) == 1  # for the update and the look at gradients alike
    assert sends([update._replace(lr=update.lr / 2) for update in updates]) == 1
    # One rate for all, and one decay, are handed over with the launch.
    assert sends([update._replace(lr=0.5, weight_decay=0.0) for update in updates]) == 0


def test_rates_that_differ_by_less_than_their_types_are_not_taken_for_one() -> None:
    where = tables.where_of(torch.zeros(1, device=DEVICE).device)
    assert tables.numbers(where, [0.1, np.float64(0.1)]) == (None, 0.1)
    rates, _ = tables.numbers(where, [np.float16(0.1), 0.1])  # equal, as numpy compares them
    assert rates is not None
    assert rates.tolist() == [float(np.float16(0.1)), 0.1]


@pytest.mark.parametrize("state", STATES)
def test_a_plan_is_made_again_when_a_tensor_or_a_mask_has_changed(state: State) -> None:
    updates = weights(4, state)
    where = tables.where_of(updates[0].param.device)
    known = tables.fingerprint(where, updates)
    assert tables.fingerprint(where, updates) == known
    assert tables.fingerprint(where, updates[:3]) != known
    pruned = updates[3]
    changes: list[dict[str, Any]] = [
        {name: tensor.clone()}
        for name, tensor in tensors_of(pruned).items()
        if name != "grad" and tensor.numel()
    ]
    changes += [{"mask": None}, {"dense": None}, {"grad": pruned.grad.float()}]
    changes += [{"dense": pruned.dense[::2]}, {"exp_avg": pruned.exp_avg[:-1]}]  # type: ignore[index]
    changes += [{"grad": pruned.grad[:-1]}, {"param": pruned.param[:-1]}]
    for name in ("param", "grad", "dense"):  # of the same memory
        tensor = getattr(pruned, name)
        changes += [{name: tensor.view(2, -1).t()}, {name: tensor.view(torch.int16)}]
    for change in changes:
        changed = [*updates[:3], pruned._replace(**change)]
        assert tables.fingerprint(where, changed) != known, list(change)
    pruned.exp_avg.data = pruned.exp_avg.clone()  # in place, and no other object
    assert tables.fingerprint(where, updates) != known


def test_what_the_kernels_do_not_cover_goes_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compress, adamw = mock.Mock(wraps=reference.compress_), mock.Mock(wraps=reference.adamw_)
    monkeypatch.setattr(reference, "compress_", compress)
    monkeypatch.setattr(reference, "adamw_", adamw)
    keep = torch.rand(100) < 0.5
    mask, dense = Mask.from_bool(keep), torch.randn(100, dtype=torch.float64)
    cuda.compress_(dense, mask, torch.zeros(mask.kept, dtype=torch.float64))
    compress.assert_not_called()
    for out in (torch.zeros(mask.kept), torch.zeros(2 * mask.kept, dtype=torch.float64)[::2]):
        cuda.compress_(dense, mask, out)
        assert torch.equal(out, dense[keep].to(out.dtype))
    assert compress.call_count == 2
    for state in STATES:
        whole, pruned = weights(2, state)
        adamw.reset_mock()
        strided = torch.zeros(600).bfloat16()[::2]
        cuda.adamw_([whole, pruned._replace(dense=strided)], SETTINGS, None)
        adamw.assert_not_called()
        spread = torch.empty(600, dtype=whole.exp_avg.dtype)[::2].copy_(whole.exp_avg)
        for change in ({"remainder": torch.zeros(300)}, {"exp_avg": spread}):
            cuda.adamw_([whole._replace(**change)], SETTINGS, None)
        assert adamw.call_count == 2


@pytest.mark.parametrize("trouble", ["rocm", "mps", "no triton", "interpreter"])
def test_where_there_is_no_fast_path_one_warning_says_so(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(torch.device("cuda")) is choose(torch.device("cpu"), "triton") is cuda
    dispatch._warn_once.cache_clear()
    device = torch.device("mps" if trouble == "mps" else "cuda")
    message = f"no kernels for {trouble}; using plain torch operations"
    if trouble == "rocm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    elif trouble == "no triton":
        monkeypatch.delattr(_kernels, "triton_launch")
        monkeypatch.setitem(sys.modules, "samo.kernels.triton_launch", None)
        message = r"samo's kernels for cuda need triton \(.*\); using plain torch"
    elif trouble == "interpreter":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "IS_INTERPRETED", True)
        message = "cannot run under TRITON_INTERPRET=1; using plain torch"
    with pytest.warns(UserWarning, match=message):
        assert choose(device) is reference
    assert choose(device) is reference  # and a second warning would be an error here
    dispatch._warn_once.cache_clear()


def compressed(path: Any, dtype: torch.dtype) -> tuple[nn.Module, samo.AdamW]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 12)).to(DEVICE)
    samo.compress_(model, samo.prune(model, 0.5), dtype=dtype, kernels=path)
    groups = samo.param_groups(model, lr=0.01, weight_decay=0.1)
    return model, samo.AdamW(groups, kernels=path)


def step(model: nn.Module, opt: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    opt.zero_grad()
    for _ in range(2):
        x = torch.randn(5, 12).to(model[0].weight.dtype)
        (model(x).float().square().mean() * 4).backward()
    opt.step()


def test_a_model_trains_as_with_the_reference() -> None:
    """Through everything that moves tensors to other addresses."""
    dtype = torch.float16
    model, opt = compressed("triton", dtype)
    twin, twin_opt = compressed("reference", dtype)
    step(model, opt, 0)
    step(twin, twin_opt, 0)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    step(model, opt, 1)
    model.load_state_dict(saved[0])
    model = copy.deepcopy(model)
    opt = samo.AdamW(samo.param_groups(model, lr=0.01, weight_decay=0.1), kernels="triton")
    opt.load_state_dict(saved[1])
    for seed in (2, 3):
        step(model, opt, seed)
        step(twin, twin_opt, seed)
    # Some roundings apart in fp32, and so rarely 1 ulp of a 16-bit weight.
    digits = torch.finfo(dtype).eps
    weights = ((model[0].weight, twin[0].weight), (model[2].weight, twin[2].weight))
    for ours, theirs in (*weights, *zip(model.parameters(), twin.parameters())):
        torch.testing.assert_close(ours, theirs, rtol=8 * digits, atol=8 * digits * 0.1)
        assert torch.equal(ours == 0, theirs == 0)
    assert {state["step"].item() for state in opt.state.values()} == {3.0}


def test_counts_far_into_training_are_exact() -> None:
    counts = [1.0, 2.0, 999.0, 1e5, 2.0**24 - 2]
    updates = [each._replace(step=torch.tensor(n)) for each, n in zip(weights(5), counts)]
    expected = [copy_of(update) for update in updates]
    settings = AdamWSettings(0.9, 0.999, 1e-8)
    cuda.adamw_(updates, settings, None)
    reference.adamw_(expected, settings, None)
    for ours, theirs in zip(updates, expected):
        assert ours.step == theirs.step
        assert_ulps(ours.param, theirs.param, torch.zeros_like(ours.param), at_most=4)
