"""Every implementation of the kernels against plain dense torch, in one body."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from samo.kernels import AdamWSettings, AdamWUpdate, Kernels, choose, cpu, reference
from samo.kernels.rounding import join, master_dtype, split
from samo.mask import Mask
from tests.meters import assert_ulps

IMPLEMENTATIONS: dict[str, Kernels] = {"reference": reference, "cpu": cpu}
# Triton's kernels run on CPU tensors here, under its interpreter (see conftest.py), or on a GPU's.
DEVICES: dict[str, torch.device] = {}
if importlib.util.find_spec("triton") is not None:
    IMPLEMENTATIONS["triton"] = choose(torch.device("cpu"), "triton")
    if torch.cuda.is_available():
        DEVICES["triton"] = torch.device("cuda")
SIZES = [0, 1, 31, 32, 33, 64, 65, 2047, 2048, 2049, 4099, 70_001]
DENSITIES = [0.0, "one", 0.1, 1.0]
# Weights and gradients as compress_ pairs them up, float16 with its unscaled wider gradients.
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float16, torch.float32),
]


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with torch.device(DEVICES.get(request.param, torch.device("cpu"))):
        yield IMPLEMENTATIONS[request.param]


def is_interpreted(kernels: Kernels) -> bool:
    return kernels is IMPLEMENTATIONS.get("triton") and not torch.cuda.is_available()


def affordable(kernels: Kernels, numel: int) -> int:
    """The interpreter takes some 10 ms for each block: two must do."""
    return min(numel, 2_503) if is_interpreted(kernels) else numel


def draw_keep(numel: int, density: float | str) -> Tensor:
    if isinstance(density, str):
        keep = torch.zeros(numel, dtype=torch.bool)
        keep[numel // 2 : numel // 2 + 1] = True
        return keep
    return torch.rand(numel) < density


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS)
def test_compress_takes_the_kept_entries_in_flat_order(
    kernels: Kernels,
    numel: int,
    density: float | str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    numel = affordable(kernels, numel)
    keep = draw_keep(numel, density)
    dense = torch.randn(numel).to(dtype)
    out = torch.full((int(keep.sum()),), 7.0, dtype=grad_dtype)
    kernels.compress_(dense, Mask.from_bool(keep), out)
    assert torch.equal(out, dense[keep].to(grad_dtype))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS)
def test_compress_adds_with_one_rounding(
    kernels: Kernels, numel: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    numel = affordable(kernels, numel)
    keep = draw_keep(numel, 0.2)
    dense = torch.randn(numel).to(dtype)
    out = torch.randn(int(keep.sum())).to(grad_dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (out.to(wide) + dense[keep].to(wide)).to(grad_dtype)
    kernels.compress_(dense, Mask.from_bool(keep), out, add=True)
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, under the interpreter
def test_compress_keeps_infinities_and_nans(kernels: Kernels) -> None:
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        dense = torch.tensor([inf, 1.0, -inf, nan, 3e38], dtype=dtype)
        mask = Mask.from_bool(torch.tensor([True, False, True, True, True]))
        out = torch.tensor([1.0, 1.0, 1.0, 3e38], dtype=dtype)
        kernels.compress_(dense, mask, out, add=True)
        assert out.tolist()[:2] == [inf, -inf]
        assert out[2].isnan()
        assert out[3] == (torch.tensor(3e38, dtype=dtype) * 2)


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("is_masked", [True, False], ids=["pruned", "unpruned"])
def test_compress_multiplies_by_a_factor(kernels: Kernels, is_masked: bool, add: bool) -> None:
    for dtype, grad_dtype in PAIRS:
        keep = draw_keep(1100, 0.1 if is_masked else 1.0)
        dense = torch.randn(1100).to(dtype)
        out = torch.randn(int(keep.sum())).to(grad_dtype)
        scaled = dense[keep].float() * 2.0**-3
        expected = ((out + scaled) if add else scaled).to(grad_dtype)
        mask = Mask.from_bool(keep) if is_masked else None
        kernels.compress_(dense, mask, out, add=add, factor=torch.tensor(2.0**-3))
        assert torch.equal(out, expected)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_expand_puts_zeros_where_the_mask_drops(
    kernels: Kernels, numel: int, density: float | str, dtype: torch.dtype
) -> None:
    numel = affordable(kernels, numel)
    keep = draw_keep(numel, density)
    values = torch.randn(int(keep.sum())).to(dtype)
    dense = torch.full((numel,), float("nan"), dtype=dtype)
    kernels.expand_(values, Mask.from_bool(keep), dense)
    expected = torch.zeros(numel, dtype=dtype)
    expected[keep] = values
    assert torch.equal(dense, expected)


def test_kernels_follow_strides(kernels: Kernels) -> None:
    keep = torch.rand(8, 6, 3, 3) < 0.3
    mask = Mask.from_bool(keep)
    dense = torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last)
    out = torch.empty(mask.kept)
    kernels.compress_(dense, mask, out)
    assert torch.equal(out, dense[keep])
    kernels.expand_(out * 2, mask, dense)
    assert torch.equal(dense[keep], out * 2)
    assert not dense[~keep].any()
    assert dense.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("is_masked", [True, False], ids=["pruned", "unpruned"])
@pytest.mark.parametrize("numel", [1, 2049, 70_001])
@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.0])
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS)
def test_adamw_equals_torch_on_the_kept_entries(
    kernels: Kernels,
    is_masked: bool,
    numel: int,
    beta1: float,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    numel = affordable(kernels, numel)
    keep = draw_keep(numel, 0.3) if is_masked else torch.ones(numel, dtype=torch.bool)
    kept = int(keep.sum())
    master = torch.randn(kept, dtype=master_dtype(dtype))
    values, rest = split(master, dtype)
    dense = torch.zeros(numel, dtype=dtype)
    dense[keep] = values
    master = join(values, rest)

    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=0.01, betas=(beta1, 0.95), weight_decay=0.1, foreach=False
    )
    mask = Mask.from_bool(keep) if is_masked else None
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    step = torch.tensor(0.0)
    steps = 1 if is_interpreted(kernels) else 3
    for step_number in range(steps):
        before = theirs.detach().clone()
        grad = (torch.randn(kept) * 0.01).to(grad_dtype)
        theirs.grad = grad.to(theirs.dtype)
        optimizer.step()
        update = AdamWUpdate(dense, mask, rest, grad, exp_avg, exp_avg_sq, step)
        kernels.adamw_([update], AdamWSettings(0.01, beta1, 0.95, 1e-8, 0.1), None)
        ours = join(dense[keep], rest)
        assert not dense[~keep].any()
        if kernels is reference:
            assert torch.equal(ours, theirs)
            continue
        # torch's square root (MKL's) may be 1 ulp off, numba's is not. Carried through a quotient
        # that is 3 ulp of the largest term in the sum. Both go on from the same weights, but not from
        # the same moments: a GPU's differ by a digit in each step, as below.
        more = step_number if kernels is IMPLEMENTATIONS.get("triton") else 0
        assert_ulps(ours, theirs.detach(), before, at_most=3 + more)
        values, new_rest = split(theirs.detach(), dtype)
        dense[keep] = values
        if rest is not None and new_rest is not None:
            rest.copy_(new_rest)
    assert step == steps
    state = optimizer.state[theirs]
    if kernels is IMPLEMENTATIONS.get("triton"):
        # The interpreter rounds a multiply-add twice, and torch's GPU kernels fuse as they like: 1 ulp
        # of the largest term a step, and gradients here are under 0.06.
        ulp = torch.finfo(exp_avg.dtype).eps
        torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=3 * ulp, atol=3 * 0.06 * ulp)
        torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=6 * ulp, atol=0)
        return
    assert torch.equal(exp_avg, state["exp_avg"])
    assert torch.equal(exp_avg_sq, state["exp_avg_sq"])


def test_a_skipped_step_changes_nothing(kernels: Kernels) -> None:
    keep = torch.rand(5000) < 0.1
    mask = Mask.from_bool(keep)
    values, rest = split(torch.randn(mask.kept), torch.bfloat16)
    assert rest is not None
    dense = torch.zeros(5000, dtype=torch.bfloat16)
    dense[keep] = values
    tensors = [dense, rest, torch.rand(mask.kept), torch.rand(mask.kept), torch.tensor(5.0)]
    before = [tensor.clone() for tensor in tensors]
    grad = torch.full((mask.kept,), float("nan"), dtype=torch.bfloat16)
    update = AdamWUpdate(dense, mask, rest, grad, *tensors[2:])
    settings = AdamWSettings(0.1, 0.9, 0.9, 1e-8, 0.1)
    kernels.adamw_([update], settings, torch.tensor(True))
    assert all(torch.equal(old, new) for old, new in zip(before, tensors))
    kernels.adamw_([update], settings, torch.tensor(False))
    assert dense[keep].isnan().all()
    assert tensors[4] == 6


def draw_update(
    numel: int, density: float | None, dtype: torch.dtype, grad_dtype: torch.dtype, step: int
) -> AdamWUpdate:
    """A weight in the middle of its training; unpruned without a density."""
    keep = torch.ones(numel, dtype=torch.bool) if density is None else draw_keep(numel, density)
    kept = int(keep.sum())
    values, rest = split(torch.randn(kept, dtype=master_dtype(dtype)), dtype)
    dense = torch.zeros(numel, dtype=dtype)
    dense[keep] = values
    grad = (torch.randn(kept) * 0.01).to(grad_dtype)
    moments = torch.randn(kept).to(master_dtype(dtype)) * 0.01
    mask = None if density is None else Mask.from_bool(keep)
    return AdamWUpdate(
        dense, mask, rest, grad, moments, moments.square() + 1e-6, torch.tensor(float(step))
    )


def copy_of(update: AdamWUpdate) -> AdamWUpdate:
    return AdamWUpdate(*(part.clone() if isinstance(part, Tensor) else part for part in update))


def master_of(update: AdamWUpdate) -> Tensor:
    dense, mask = update.dense, update.mask
    return join(dense.view(-1) if mask is None else dense[mask.to_bool()], update.rest_Z)


@pytest.mark.parametrize("is_lr_tensor", [False, True], ids=["lr", "lr tensor"])
@pytest.mark.parametrize("has_skip", [False, True], ids=["", "skip"])
def test_weights_of_all_kinds_are_updated_together(
    kernels: Kernels, is_lr_tensor: bool, has_skip: bool
) -> None:
    densities = [0.1, None, 0.6, None, 0.1, 1.0]
    sizes = [2049, 33, 1, 1025, 0, 2048]
    updates = [
        draw_update(numel, density, dtype, grad_dtype, step=7 * index)
        for index, ((dtype, grad_dtype), numel, density) in enumerate(
            zip(PAIRS * 2, sizes + sizes[::-1], densities + densities[::-1])
        )
    ]
    expected = [copy_of(update) for update in updates]
    before = [master_of(update) for update in updates]
    lr = torch.tensor(0.015625) if is_lr_tensor else 0.015625  # no rounding of it in any type
    settings = AdamWSettings(lr, 0.9, 0.95, 1e-8, 0.125)
    skip = torch.tensor(False) if has_skip else None
    kernels.adamw_(updates, settings, skip)
    reference.adamw_(expected, settings, skip)
    for ours, theirs, old in zip(updates, expected, before):
        assert ours.step == theirs.step
        assert_ulps(master_of(ours), master_of(theirs), old, at_most=3)
        if ours.mask is not None:
            assert not ours.dense[~ours.mask.to_bool()].any()


@pytest.mark.parametrize("has_skip", [False, True], ids=["", "skip"])
def test_each_weight_may_have_a_rate_of_its_own(kernels: Kernels, has_skip: bool) -> None:
    scales = (8.0, 1.0, 0.5, 3.0)  # powers of 2 round nothing, 3 times 2^-6 does not either
    updates = [
        draw_update(300, density, torch.float32, torch.float32, step=5)._replace(lr_scale=scale)
        for scale, density in zip(scales, (0.2, None, 0.5, None))
    ]
    settings = AdamWSettings(2.0**-6, 0.9, 0.95, 1e-8, 0.125)
    skip = torch.tensor(False) if has_skip else None
    # The rate of a weight is scaled, and the rate times the decay is not.
    alone = [copy_of(update)._replace(lr_scale=1.0) for update in updates]
    before = [master_of(update) for update in updates]
    kernels.adamw_(updates, settings, skip)
    for ours, theirs, old, scale in zip(updates, alone, before, scales):
        own = settings._replace(lr=2.0**-6 * scale, weight_decay=0.125 / scale)
        reference.adamw_([theirs], own, skip)
        assert_ulps(master_of(ours), master_of(theirs), old, at_most=3)
        assert not torch.equal(master_of(ours), old)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
def test_a_nan_with_all_bits_set_stays_one(kernels: Kernels) -> None:
    """A GPU makes such NaNs, and rounding would carry one over into -0."""
    all_set = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    out = torch.zeros(1, dtype=torch.bfloat16)
    kernels.compress_(all_set, Mask.from_bool(torch.tensor([True])), out)
    assert out.isnan()
    dense = torch.tensor([-0.0], dtype=torch.bfloat16)
    rest = torch.tensor([-1], dtype=torch.int16)  # together 0x7FFFFFFF
    update = AdamWUpdate(
        dense, None, rest, torch.ones(1), torch.zeros(1), torch.zeros(1), torch.tensor(0.0)
    )
    kernels.adamw_([update], AdamWSettings(0.1, 0.9, 0.9, 1e-8, 0.1), None)
    assert dense.isnan()


def test_addresses_may_change_between_steps(kernels: Kernels) -> None:
    settings = AdamWSettings(0.01, 0.9, 0.95, 1e-8, 0.1)
    update = draw_update(2100, 0.1, torch.bfloat16, torch.bfloat16, step=0)
    expected = copy_of(update)
    for _ in range(3):
        update = copy_of(update)
        kernels.adamw_([update], settings, None)
        reference.adamw_([expected], settings, None)
        # Roundings of three steps; a wrong address would be off by a step, 0.01.
        torch.testing.assert_close(master_of(update), master_of(expected), rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9000), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_expand_inverts_compress(numel: int, density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(numel, generator=generator) < density
    dense = torch.randn(numel, generator=generator) * keep
    mask = Mask.from_bool(keep)
    for kernels in (reference, cpu):
        values, back = torch.empty(mask.kept), torch.full((numel,), 9.0)
        kernels.compress_(dense, mask, values)
        kernels.expand_(values, mask, back)
        assert torch.equal(back, dense)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_remainder_and_weight_are_the_master_exactly(bits: int) -> None:
    master = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    if master.isnan().any():
        return
    values, rest = split(master, torch.bfloat16)
    assert torch.equal(join(values, rest).view(torch.int32), master.view(torch.int32))


def test_rounding_is_half_away_from_zero() -> None:
    master = torch.tensor([0x3F7F8000, 0x3F808000, 0x3F80C000], dtype=torch.int32)
    values, rest = split(master.view(torch.float32), torch.bfloat16)
    assert values.view(torch.int16).tolist() == [0x3F80, 0x3F81, 0x3F81]
    assert rest is not None
    assert rest.tolist() == [-0x8000, -0x8000, -0x4000]


def test_work_is_shared_among_threads_without_a_seam() -> None:
    numel = 2048 * 200 + 77
    keep = torch.rand(numel) < 0.1
    mask, dense = Mask.from_bool(keep), torch.randn(numel)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            out = torch.full((mask.kept,), float("nan"))
            cpu.compress_(dense, mask, out)
            assert torch.equal(out, dense[keep])
    finally:
        torch.set_num_threads(threads)


def test_the_fast_path_is_chosen_on_a_cpu_unless_the_reference_is_asked_for() -> None:
    assert choose(torch.device("cpu")) is cpu
    assert choose(torch.device("cpu"), "reference") is reference
    assert choose(torch.device("cuda"), "reference") is reference


def test_another_cpu_a_forked_child_and_the_next_process_compute_the_same(tmp_path: Path) -> None:
    """Without AVX-512, in processes of their own; the next one finds compiled code, and compiles none."""
    script = """
import os, torch
from samo.kernels import AdamWSettings, AdamWUpdate, cpu, loops, reference
from samo.kernels.rounding import join
from samo.mask import Mask

assert not any(loops._LANES.values())
torch.set_num_threads(2)
keep = torch.rand(100_001) < 0.1
mask, numel = Mask.from_bool(keep), keep.numel()

def check():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        dense = torch.randn(numel).to(dtype) * keep
        out, back = torch.ones(mask.kept, dtype=dtype), torch.ones(numel, dtype=dtype)
        cpu.compress_(dense, mask, out)
        assert torch.equal(out, dense[keep])
        cpu.expand_(out, mask, back)
        assert torch.equal(back, dense)
        moment = torch.float64 if dtype == torch.float64 else torch.float32
        rest = torch.zeros(mask.kept, dtype=torch.int16) if dtype == torch.bfloat16 else None
        update = AdamWUpdate(
            dense, mask, rest, out, torch.zeros(mask.kept, dtype=moment),
            torch.zeros(mask.kept, dtype=moment), torch.zeros(()),
        )
        expected = join(out, rest) * 0.5 - 0.1 * torch.sign(out.to(moment))  # the first step
        cpu.adamw_([update], AdamWSettings(0.1, 0.9, 0.9, 0.0, 5.0), None)
        torch.testing.assert_close(join(dense[keep], rest), expected, rtol=1e-5, atol=1e-6)
    assert not cpu.find_nonfinite([dense, out])

check()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as a data loader's worker does: torch's own operations need it
    check()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", script]
    subprocess.run(command, env=environment, check=True)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb*")}
    assert kept
    subprocess.run(command, env=environment, check=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb*")} == kept


def test_values_that_are_not_finite_are_found(kernels: Kernels) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        sound = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 0.0], dtype=dtype)
        assert not kernels.find_nonfinite([sound, sound])
        assert not kernels.find_nonfinite([sound[::2], torch.empty(0, dtype=dtype)])
        for bad in ("inf", "-inf", "nan"):
            assert kernels.find_nonfinite([sound, torch.tensor([1.0, float(bad)], dtype=dtype)])
            assert kernels.find_nonfinite([torch.tensor([float(bad), 1.0, 2.0], dtype=dtype)[::2]])


def test_a_nan_stays_a_nan_whatever_its_bits() -> None:
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, -0x400000], dtype=torch.int32)
    values, rest = split(bits.view(torch.float32), torch.bfloat16)
    assert values.isnan().all()
    assert join(values, rest).isnan().all()


def test_numbas_number_of_threads_stays_as_it_was() -> None:
    mask = Mask.from_bool(torch.ones(2048 * 100, dtype=torch.bool))
    before, threads = numba.get_num_threads(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        cpu.compress_(torch.zeros(mask.numel), mask, torch.empty(mask.kept))
    finally:
        torch.set_num_threads(threads)
    assert numba.get_num_threads() == before


@pytest.mark.parametrize("trouble", ["compile", "cache"])
def test_samo_works_where_numba_cannot(trouble: str) -> None:
    script = """
import torch, samo
model = samo.compress_(torch.nn.Sequential(torch.nn.Linear(9, 9)), samo.Masks({}))
model(torch.ones(1, 9)).sum().backward()
samo.AdamW(samo.parameters(model)).step()
"""
    environment = dict(os.environ)
    if trouble == "compile":
        environment["NUMBA_DISABLE_JIT"] = "1"
    else:  # as where neither the package nor the home folder can be written to
        script = "import numba.core.caching as c; c.CacheImpl._locator_classes = []" + script
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=environment, check=True)
