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

import pytest
import torch
from torch import nn

import samo
from samo import kernels as _kernels
from samo.kernels import AdamWSettings, AdamWUpdate, choose, reference
from samo.mask import Mask
from tests.meters import assert_ulps

pytest.importorskip("triton", reason="needs triton")
cuda: Any = pytest.importorskip("samo.kernels.cuda", reason="needs triton")
tables: Any = pytest.importorskip("samo.kernels.tables", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = AdamWSettings(0.01, 0.9, 0.95, 1e-8, 0.1)


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["80 --once", "90"])
@pytest.mark.parametrize("kernels", ["compile_kernels", "compile_lean_kernels"])
def test_every_kernel_compiles_without_a_gpu(kernels: str, arguments: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", f"tests.{kernels}", *arguments.split()]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"sm_{arguments[:2]}: " in done.stdout


CONFIGS = [
    *(cuda.Config("slot", slots, 1) for slots in (32, 64, 128, 256)),
    *(cuda.Config("entry", words, warps) for words, warps in ((64, 2), (128, 4))),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_way_to_compress_gives_the_same(config: Any) -> None:
    for density in (0.0, 0.05, 0.4):
        keep = torch.rand(2048 + 77) < density
        mask, dense = Mask.from_bool(keep), torch.randn(keep.numel()).bfloat16()
        out = torch.full((mask.kept,), 7.0, dtype=torch.bfloat16)
        cuda.launch_compress(config, dense, mask, out)
        assert torch.equal(out, dense[keep])
        if config.way == "entry":
            back = torch.full_like(dense, 7.0)
            cuda.launch_expand(config, out, mask, back)
            assert torch.equal(back, dense * keep)


def test_bits_at_both_ends_of_words_and_blocks_are_found() -> None:
    numel = 2 * 2048
    keep = torch.zeros(numel, dtype=torch.bool)
    keep[[0, 31, 32, 63, 64, 2046, 2047, 2048, 2079, numel - 1]] = True
    dense = torch.arange(numel, dtype=torch.float32)
    for config in CONFIGS:
        out = torch.empty(10)
        cuda.launch_compress(config, dense, Mask.from_bool(keep), out)
        assert torch.equal(out, dense[keep])


def test_the_way_to_compress_follows_the_density() -> None:
    assert cuda.compress_config(kept=10, numel=10_000) == ("slot", 32, 1)
    assert cuda.compress_config(kept=500, numel=10_000) == ("slot", 256, 1)
    assert cuda.compress_config(kept=1000, numel=10_000) == ("slot", 256, 1)
    assert cuda.compress_config(kept=3000, numel=10_000).way == "entry"
    assert cuda.compress_config(kept=0, numel=0).way == "slot"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the real one takes long enough")
def test_the_tuning_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import triton_tuning

    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["tuning", "--toy", "--rounds", "1", "--out", str(out)])
    triton_tuning.main()
    assert "| compress slot 256 x 1 |" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) > 25


def weights(count: int, dtype: torch.dtype = torch.bfloat16) -> list[AdamWUpdate]:
    """Pruned and unpruned weights in turns."""
    updates = []
    for index in range(count):
        keep = torch.rand(300) < (0.1 if index % 2 else 2.0)
        kept = int(keep.sum())
        updates.append(
            AdamWUpdate(
                torch.zeros(300, dtype=dtype),
                Mask.from_bool(keep) if index % 2 else None,
                torch.zeros(kept, dtype=torch.int16),
                torch.randn(kept).to(dtype),
                torch.zeros(kept),
                torch.zeros(kept),
                torch.tensor(0.0),
            )
        )
    return updates


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    kind = type(cuda.triton_kernels.expand_kernel)
    run = kind.run

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(kind, "run", count)
    return counts


def test_launches_do_not_grow_with_the_number_of_weights(launches: Counter[str]) -> None:
    for count in (2, 20):
        launches.clear()
        updates = weights(count)
        cuda.find_nonfinite([update.grad_Z for update in updates])
        cuda.adamw_(updates, SETTINGS, torch.tensor(False))
        assert dict(launches) == {
            "find_exponent_kernel": 1,
            "adamw_scalars_kernel": 1,
            "adamw_kept_kernel": 1,
            "adamw_all_kernel": 1,
        }
        assert all(update.step == 1 for update in updates)


def test_a_table_is_sent_again_only_when_an_address_changes() -> None:
    updates = weights(4)
    cuda.adamw_(updates, SETTINGS, None)
    sent = tables.rows.cache_info().misses
    cuda.adamw_(updates, SETTINGS, None)
    assert tables.rows.cache_info().misses == sent
    cuda.adamw_(
        [*updates[:3], updates[3]._replace(grad_Z=updates[3].grad_Z.clone())], SETTINGS, None
    )
    assert tables.rows.cache_info().misses == sent + 1


def test_what_the_kernels_do_not_cover_goes_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def watch(name: str) -> None:
        original = getattr(reference, name)

        def call(*args: Any, **options: Any) -> None:
            calls.append(name)
            original(*args, **options)

        monkeypatch.setattr(reference, name, call)

    watch("compress_")
    watch("adamw_")
    keep = torch.rand(100) < 0.5
    mask, dense = Mask.from_bool(keep), torch.randn(100, dtype=torch.float64)
    out = torch.zeros(mask.kept, dtype=torch.float64)
    cuda.compress_(dense, mask, out)
    assert not calls
    cuda.compress_(dense, mask, out, add=True)
    assert torch.equal(out, 2 * dense[keep])
    strided = torch.zeros(2 * mask.kept, dtype=torch.float64)[::2]
    cuda.compress_(dense, mask, strided)
    assert torch.equal(strided, dense[keep])
    whole = weights(1)[0]
    cuda.adamw_([whole._replace(rest_Z=None)], SETTINGS, None)
    cuda.adamw_([whole._replace(dense=torch.zeros(600).bfloat16()[::2])], SETTINGS, None)
    assert calls == ["compress_", "compress_", "adamw_", "adamw_"]


def test_a_gpu_takes_the_triton_kernels() -> None:
    assert choose(torch.device("cuda")) is cuda
    assert choose(torch.device("cpu"), "triton") is cuda


@pytest.mark.parametrize("trouble", ["rocm", "mps", "no triton", "interpreter"])
def test_where_there_is_no_fast_path_one_warning_says_so(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kernels._warn_once.cache_clear()
    device = torch.device("mps" if trouble == "mps" else "cuda")
    message = "no kernels of its own for this device (.*); plain torch operations do the same"
    if trouble == "rocm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    elif trouble == "no triton":
        monkeypatch.delattr(_kernels, "cuda")
        monkeypatch.setitem(sys.modules, "samo.kernels.cuda", None)
        message = "samo's kernels for cuda need triton, and .*; plain torch operations do the same"
    elif trouble == "interpreter":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "IS_INTERPRETED", True)
        message = "cannot run under TRITON_INTERPRET=1; plain torch operations do the same"
    with pytest.warns(UserWarning, match=message):
        assert choose(device) is reference
    assert choose(device) is reference  # and a second warning would be an error here
    _kernels._warn_once.cache_clear()


def compressed(path: Any, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 12)).to(DEVICE)
    samo.compress_(model, samo.prune(model, 0.5), dtype=dtype, kernels=path)
    if dtype == torch.float16:
        samo.LossScaler(model, init_scale=4.0)
    return model, samo.AdamW(samo.param_groups(model, 0.1), lr=0.01)


def step(model: nn.Module, opt: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    opt.zero_grad()
    for _ in range(2):
        x = torch.randn(5, 12).to(model[0].weight.dtype)
        (model(x).float().square().mean() * 4).backward()
    opt.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_trains_as_with_the_reference(dtype: torch.dtype) -> None:
    """Through everything that moves tensors to other addresses."""
    model, opt = compressed("triton", dtype)
    twin, twin_opt = compressed("reference", dtype)
    step(model, opt, 0)
    step(twin, twin_opt, 0)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    step(model, opt, 1)
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    state = opt.state_dict()
    model = copy.deepcopy(model).to(DEVICE)
    opt = samo.AdamW(samo.param_groups(model, 0.1), lr=0.01)
    opt.load_state_dict(state)
    for seed in (2, 3):
        step(model, opt, seed)
        step(twin, twin_opt, seed)
    # Some roundings apart in fp32, and so seldom one unit of a 16-bit weight's last place.
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        digits = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=8 * digits, atol=8 * digits * 0.1)
        assert torch.equal(ours == 0, theirs == 0)
    steps = [state["step"].item() for state in opt.state.values()]
    assert steps == [3.0] * len(steps)


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    model, opt = compressed("triton", torch.bfloat16)
    step(model, opt, 0)
    before = copy.deepcopy(dict(model.state_dict()))
    leaf = next(samo.parameters(model))
    assert leaf.grad is not None
    leaf.grad[1] = float("inf")
    opt.step()
    assert opt.skipped_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_counts_far_into_training_are_exact() -> None:
    keep_counts = [1, 2, 999, 100_000, 2**24 - 2]
    updates = [
        update._replace(step=torch.tensor(float(count)))
        for update, count in zip(weights(5), keep_counts)
    ]
    expected = [
        AdamWUpdate(*(part.clone() if isinstance(part, torch.Tensor) else part for part in update))
        for update in updates
    ]
    settings = AdamWSettings(0.01, 0.9, 0.999, 1e-8, 0.1)
    cuda.adamw_(updates, settings, None)
    reference.adamw_(expected, settings, None)
    for ours, theirs in zip(updates, expected):
        assert ours.step == theirs.step
        zeros = torch.zeros_like(ours.exp_avg_Z)
        ours_change, theirs_change = (
            _kernels.rounding.join(
                part.dense if part.mask is None else part.dense[part.mask.to_bool()], part.rest_Z
            )
            for part in (ours, theirs)
        )
        assert_ulps(ours_change, theirs_change, zeros, at_most=3)
