"""Every implementation of the kernels against plain dense torch, in one body."""

import os
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path

import numba
import pytest
import torch
from numba.core import caching

from samo import kernels as _kernels
from samo.kernels import AdamWSettings, Kernels, choose, cpu, cpu_masks, operators, reference
from samo.kernels.reference import OLDEST, ages_at
from samo.kernels.rounding import join, split
from samo.mask.mask import Mask
from tests.kernels.cases import (
    DEVICES,
    KINDS,
    LEAN_KINDS,
    SETTINGS,
    Kind,
    State,
    affordable,
    assert_as_reference,
    assert_copied,
    copy_of,
    draw_keep,
    draw_update,
    is_interpreted,
    is_triton,
    master_of,
    tensors_of,
)
from tests.meters import assert_same as assert_equal, assert_ulps

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Dense gradients and what they are compressed to, and the other way for values and dense weights.
CASTS = [
    *((dtype, dtype) for dtype in FLOATS),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
]
# Every size with every density, and every cast with some of both.
SIZES = [0, 1, 33, 64, 2047, 2048, 2049, 70_001]
MOVES = [
    (numel, density, *cast)
    for (numel, density), cast in zip(product(SIZES, [0.0, "one", 0.1, 1.0]), cycle(CASTS))
]
STATES: list[State] = ["exact", "ages", "lean"]


@pytest.mark.parametrize(("numel", "density", "dtype", "target"), MOVES)
def test_compress_takes_the_kept_entries_and_expand_puts_zeros_elsewhere(
    kernels: Kernels, numel: int, density: float | str, dtype: torch.dtype, target: torch.dtype
) -> None:
    keep = draw_keep(affordable(kernels, numel), density)
    mask, dense = Mask.from_bool(keep), torch.randn(keep.numel()).to(dtype)
    values = torch.full((mask.kept,), 7.0, dtype=target)
    kernels.compress_(dense, mask, values)
    assert torch.equal(values, dense[keep].to(target))
    back = torch.full((keep.numel(),), float("nan"), dtype=target)
    kernels.expand_(dense[keep], mask, back)
    expected = torch.zeros(keep.numel(), dtype=target)
    expected[keep] = values
    assert torch.equal(back, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize(("dtype", "target"), CASTS)
def test_numbers_of_all_sizes_are_rounded_as_torch_rounds_them(
    kernels: Kernels, dtype: torch.dtype, target: torch.dtype
) -> None:
    """Ties, subnormal numbers, those that overflow, infinities and NaNs."""
    # The last one is a NaN that a GPU makes: rounding its bits would turn it into -0.
    bits = torch.tensor([0x3F7F8000, 0x3F808000, 0x3F80C000, 0x3F803000, 0x7F7FFFFF, 0x7FFFFFFF])
    special = [65504, 65519, 65520, 65536, 3.4e38, 2**-14, 2**-24, 2**-25, 1.5 * 2**-24, 0.0]
    special += [float("inf"), float("nan")]
    wide = torch.cat(
        [
            bits.to(torch.int32).view(torch.float32),
            torch.tensor(special),
            torch.randn(500) * 2.0 ** torch.randint(-30, 20, (500,)),
        ]
    )
    values = torch.cat([wide, -wide]).to(dtype)
    mask = Mask.from_bool(torch.ones(values.numel(), dtype=torch.bool))
    expected = values.to(target)
    for operation in (kernels.compress_, kernels.expand_):
        out = torch.full((values.numel(),), 7.0, dtype=target)
        operation(values, mask, out)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(0), expected.nan_to_num(0))


def test_the_operators_of_compiled_code_are_sound() -> None:
    """Their schemas, and what they return for fake tensors and dynamic sizes."""
    with torch.device(DEVICES.get("triton", "cpu")):
        mask = Mask.from_bool(draw_keep(37 * 53, 0.3).view(37, 53))
        dense, values = torch.randn(37, 53), torch.randn(mask.kept)
    packed, kept, shape = mask.packed, mask.kept, [37, 53]
    if dense.is_cuda:
        compress, expand = operators._compress_triton, operators._expand_triton
        torch.library.opcheck(compress, (dense, packed, kept, torch.bfloat16))
        torch.library.opcheck(expand, (values, packed, values, shape, torch.bfloat16))
    else:
        compress, expand = operators._compress, operators._expand
        torch.library.opcheck(compress, (dense, packed, kept, "bfloat16"))
        torch.library.opcheck(expand, (values, packed, shape, "bfloat16", None))


READ_IN_A_WORKER = """
import torch._inductor.config as config
from samo.kernels.operators import launch_statically
launch_statically()
config.compile_threads = 2
from torch._inductor.async_compile import AsyncCompile
setting = "__import__('torch')._inductor.config.static_launch_user_defined_triton_kernels"
print(eval(setting), AsyncCompile.process_pool().submit(eval, setting).result())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [(None, "True True"), ("0", "False False")])
def test_processes_that_compile_kernels_launch_them_statically_too(
    given: str | None, expected: str
) -> None:
    name = "TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS"
    env = {key: value for key, value in os.environ.items() if key != name}
    env |= {} if given is None else {name: given}
    command = [sys.executable, "-c", READ_IN_A_WORKER]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("density", [0.3, None], ids=["pruned", "unpruned"])
def test_kernels_follow_strides(kernels: Kernels, density: float | None) -> None:
    keep = draw_keep(8 * 6 * 3 * 3, density).view(8, 6, 3, 3)
    mask = None if density is None else Mask.from_bool(keep)
    dense = torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last)
    out = torch.empty(int(keep.sum()))
    kernels.compress_(dense, mask, out)
    assert torch.equal(out, dense[keep])
    kernels.expand_(out * 2, mask, dense)
    assert torch.equal(dense[keep], out * 2)
    assert not dense[~keep].any()
    assert dense.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_dense_tensors_of_any_strides_are_compressed(
    kernels: Kernels, density: float, dtype: torch.dtype
) -> None:
    """Some are views of one stride as vectors, too: entries of a wider tensor, or one for all."""
    numel, shape = 64 * 96, (64, 96)  # more than two blocks
    wide = torch.randn(64, 192).to(dtype)
    pairs = torch.randn(64, 96, 2).to(dtype)
    keep = draw_keep(numel, density).view(shape)
    for dense in (
        wide[:, ::2],
        wide[:, 96:],
        pairs.unbind(-1)[1],
        torch.randn(96, 64).to(dtype).t(),
        torch.full((), 2.5, dtype=dtype).expand(shape),
        torch.randn(96).to(dtype).expand(shape),
        torch._neg_view(wide[:, :96].clone()),
    ):
        out = torch.full((int(keep.sum()),), torch.nan, dtype=dtype)
        kernels.compress_(dense, Mask.from_bool(keep), out)
        assert torch.equal(out, dense[keep])


@pytest.mark.parametrize("density", [0.3, None], ids=["pruned", "unpruned"])
@pytest.mark.parametrize(
    ("numel", "settings", "is_lr_tensor"),
    [
        (1, (0.9, 0.95, 1e-8), False),
        (2049, (0.3, 0.999999, 1e-3), True),
        (70_001, (0.9, 0.0, 1e-8), False),
        (33, (0.0, 0.95, 1e-8), False),
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_adamw_equals_torch(
    kernels: Kernels,
    density: float | None,
    numel: int,
    settings: tuple[float, float, float],
    kind: Kind,
    is_lr_tensor: bool,
) -> None:
    lr = torch.tensor(0.01) if is_lr_tensor else 0.01
    update = draw_update(affordable(kernels, numel), density, kind, lr=lr)
    update.exp_avg.zero_(), update.exp_avg_sq.zero_()
    theirs = torch.nn.Parameter(master_of(update))
    beta1, beta2, eps = settings
    optimizer = torch.optim.AdamW(
        [theirs], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=0.1, foreach=False
    )
    steps = 1 if is_interpreted(kernels) else 3
    for step_number in range(steps):
        before = theirs.detach().clone()
        update.grad.copy_(torch.randn(update.grad.shape) * 0.01)
        theirs.grad = update.grad.to(theirs.dtype)
        optimizer.step()
        kernels.adamw_([update], AdamWSettings(*settings), None)
        ours = master_of(update)
        assert_copied(update)
        if kernels is reference:
            assert torch.equal(ours, theirs)
            continue
        # torch's square root (MKL's) may be 1 ulp off: through a quotient, 3 ulp of the largest
        # term. Both start from the same weights, but a GPU's moments drift, as below. torch
        # computes step size and decay in the type of a rate in a tensor, Triton in fp64.
        more = 2 * is_lr_tensor + (step_number if is_triton(kernels) else 0)
        assert_ulps(ours, theirs.detach(), before, at_most=3 + more)
        values, remainder = split(theirs.detach(), update.param.dtype)
        update.param.copy_(values)
        if update.remainder is not None and remainder is not None:
            update.remainder.copy_(remainder)
    assert update.step == steps
    state = optimizer.state[theirs]
    if is_triton(kernels):
        # The interpreter rounds a multiply-add twice, and torch's GPU kernels fuse some: 1 ulp of
        # the largest term a step, and gradients here are under 0.06.
        ulp = torch.finfo(update.exp_avg.dtype).eps
        torch.testing.assert_close(
            update.exp_avg, state["exp_avg"], rtol=3 * ulp, atol=3 * 0.06 * ulp
        )
        torch.testing.assert_close(update.exp_avg_sq, state["exp_avg_sq"], rtol=6 * ulp, atol=0)
        return
    assert torch.equal(update.exp_avg, state["exp_avg"])
    assert torch.equal(update.exp_avg_sq, state["exp_avg_sq"])


def kinds_of(state: State) -> list[Kind]:
    return LEAN_KINDS if state == "lean" else KINDS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("density", [0.1, None], ids=["pruned", "unpruned"])
def test_a_skipped_step_changes_nothing(
    kernels: Kernels, density: float | None, state: State
) -> None:
    for kind in kinds_of(state)[::3]:
        update = draw_update(600, density, kind, step=5, state=state)
        update.grad.fill_(float("nan"))
        if update.dense is not None:
            update.dense[7] = 5.0  # nor is a copy that was written to
        before = tensors_of(copy_of(update))
        kernels.adamw_([update], SETTINGS, torch.tensor(True))
        for name, new in tensors_of(update).items():
            assert name == "grad" or torch.equal(new, before[name]), name
        kernels.adamw_([update], SETTINGS, torch.tensor(False))
        assert update.param.isnan().all()
        assert update.step == 6


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("is_lr_tensor", "has_skip", "beta1"), [(False, False, 0.9), (True, True, 0.3)]
)
def test_parameters_of_all_kinds_are_updated_together(
    kernels: Kernels, is_lr_tensor: bool, has_skip: bool, beta1: float, state: State
) -> None:
    """Each with its own rate and decay; some rates are on the device, some not."""
    densities = [0.1, None, 0.6, None, 0.1, 1.0]
    sizes = [2049, 33, 1, 1025, 0, 2048]
    updates = []
    for index, kind in enumerate(kinds_of(state) * 2):
        size, density = sizes[index % 6], densities[(index + index // 11) % 6]
        lr = 2.0**-6 * (1 + index % 3)  # no rounding of it in any type
        # A float32 rate over a number and over a tensor may differ in its last place on a GPU.
        is_wide = index % 2 or kind[0] == torch.float64
        dtype = torch.float64 if is_wide else torch.float32
        rate = torch.tensor(lr, dtype=dtype) if is_lr_tensor and index % 5 else lr
        changes = {"lr": rate, "weight_decay": 0.125 * (index % 4)}
        updates.append(draw_update(size, density, kind, 7 * index, state, **changes))
    skip = torch.tensor(False) if has_skip else None
    settings = SETTINGS._replace(beta1=beta1)
    # As above; with ages, step sizes come of a table of inverses.
    more = 2 * is_lr_tensor + is_triton(kernels)
    assert_as_reference(kernels, updates, settings, skip, at_most=3 + more)


@pytest.mark.parametrize(
    ("step", "beta2"), [(0, 0.95), (999, 0.99999), (OLDEST - 1, 0.99999), (10**6, 0.99999)]
)
def test_entries_that_were_always_kept_follow_the_weight_at_any_step(
    kernels: Kernels, step: int, beta2: float
) -> None:
    theirs = draw_update(900, 0.3, step=step)
    ours = copy_of(theirs)._replace(age=ages_at(theirs.step, theirs.param.numel()))
    settings = AdamWSettings(0.9, beta2, 1e-8)
    kernels.adamw_([ours], settings, None)
    kernels.adamw_([theirs], settings, None)
    assert_equal(tensors_of(ours._replace(age=None)), tensors_of(theirs))
    assert ours.age is not None
    assert (ours.age == min(step + 1, OLDEST)).all()


def test_an_age_out_of_range_is_taken_for_a_new_entry(kernels: Kernels) -> None:
    """Ages are indices into a table of corrections."""
    ours = draw_update(300, 0.5, step=500, state="ages")
    assert ours.age is not None
    ours.age[3:5] = torch.tensor([-1, -(2**15)])
    theirs = copy_of(ours)._replace(age=ours.age.clamp(min=0))
    for update in (ours, theirs):
        kernels.adamw_([update], SETTINGS, None)
    assert_equal(tensors_of(ours), tensors_of(theirs))


def test_each_entry_is_updated_as_a_weight_of_its_age_would_be() -> None:
    ours = draw_update(900, 0.3, step=500, state="ages")
    assert ours.age is not None
    ours.age.copy_(torch.randint(0, 20, ours.age.shape))
    before = copy_of(ours)
    reference.adamw_([ours], SETTINGS, None)
    for age in range(20):
        single = copy_of(before)._replace(step=torch.tensor(float(age)), age=None)
        reference.adamw_([single], SETTINGS, None)
        mine = before.age == age
        assert torch.equal(ours.param[mine], single.param[mine])
        assert torch.equal(ours.exp_avg_sq[mine], single.exp_avg_sq[mine])


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("has_skip", [False, True], ids=["", "skip"])
def test_copies_and_parameters_may_have_strides(
    kernels: Kernels, has_skip: bool, state: State
) -> None:
    shape = (8, 6, 3, 3)
    updates, expected = [], []
    for density in (0.3, None):
        update = draw_update(8 * 6 * 3 * 3, density, KINDS[1], state=state)
        expected.append(copy_of(update))
        names = ["dense"]
        if density is None and state != "lean":
            names += ["param", "grad", "exp_avg", "exp_avg_sq"]
        parts = {
            name: getattr(update, name).view(shape).to(memory_format=torch.channels_last)
            for name in names
        }
        updates.append(update._replace(**parts))
    skip = torch.tensor(False) if has_skip else None
    kernels.adamw_(updates, SETTINGS, skip)
    reference.adamw_(expected, SETTINGS, skip)
    for ours, theirs in zip(updates, expected):
        found = ours.param.reshape(-1)
        torch.testing.assert_close(found, theirs.param, rtol=1e-6, atol=1e-6)
        assert_copied(ours)
        assert ours.dense is not None
        assert ours.dense.is_contiguous(memory_format=torch.channels_last)
    before = [copy_of(update) for update in updates]
    kernels.adamw_(updates, SETTINGS, torch.tensor(True))
    for ours, old in zip(updates, before):
        assert torch.equal(ours.dense, old.dense)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [4, 6])
def test_a_mask_of_another_size_is_refused(kernels: Kernels, size: int) -> None:
    mask = Mask.from_bool(torch.tensor([True, False, True, True, False]))
    for values, where, numel in ((3, mask, size), (size, mask, 5), (size, None, 5)):
        with pytest.raises(ValueError, match=r"fit|fill"):
            kernels.compress_(torch.zeros(numel), where, torch.zeros(values))
        with pytest.raises(ValueError, match=r"fit|fill"):
            kernels.expand_(torch.zeros(values), where, torch.zeros(numel))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
def test_a_nan_with_all_bits_set_stays_one(kernels: Kernels) -> None:
    for kind in (KINDS[0], KINDS[7]):
        update = draw_update(1, None, kind)
        bits = torch.tensor([0x7FFFFFFF], dtype=torch.int32)
        if update.remainder is None:
            update.param.copy_(bits.view(torch.float32))
        else:  # together 0x7FFFFFFF
            update.param.fill_(-0.0)
            update.remainder.fill_(-1)
        kernels.adamw_([update], SETTINGS, None)
        assert update.param.isnan()
        assert update.dense is not None
        assert update.dense.isnan()


def test_remainder_and_weight_are_the_master_exactly() -> None:
    bits = torch.randint(-(2**31), 2**31, (10_000,)).to(torch.int32)
    ties = torch.tensor([0x3F7F8000, 0x3F808000, 0x3F80C000], dtype=torch.int32)
    masters = torch.cat([ties, bits]).view(torch.float32)
    values, remainder = split(masters, torch.bfloat16)
    found = join(values, remainder)
    assert torch.equal(found.isnan(), masters.isnan())
    is_number = ~masters.isnan()
    assert torch.equal(found[is_number].view(torch.int32), masters[is_number].view(torch.int32))
    assert values[:3].view(torch.int16).tolist() == [0x3F80, 0x3F81, 0x3F81]  # away from zero


def test_two_threads_give_the_bits_of_one() -> None:
    start = draw_update(200_000, 0.4, KINDS[7], 3, "ages")
    before, found = numba.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            update = copy_of(start)
            cpu.adamw_([update], SETTINGS, None)
            out = torch.full_like(update.param, float("nan"), dtype=torch.float32)
            assert update.dense is not None
            cpu.compress_(update.dense, update.mask, out)
            assert torch.equal(out, update.param.float())
            assert not cpu.find_nonfinite([out])
            found.append(tensors_of(update))
    finally:
        torch.set_num_threads(1)
    assert numba.get_num_threads() == before
    assert_equal(found[1:], found[:1] * 3)


USE_THE_CACHE = """
import sys
import torch
from samo import Mask
from samo.kernels import cpu

torch.manual_seed(0)
keep = torch.arange(5000) % 3 == 0
mask, dense = Mask.from_bool(keep), torch.randn(5000)
values, back = torch.full((mask.kept,), 7.0), torch.full((5000,), 7.0)
if "compress" in sys.argv:
    cpu.compress_(dense, mask, values)
    assert torch.equal(values, dense[keep])
if "expand" in sys.argv:
    cpu.expand_(dense[keep], mask, back)
    assert torch.equal(back, dense * keep)
"""


def test_loops_from_the_cache_do_not_stand_in_for_others(tmp_path: Path) -> None:
    """A process adds one loop to the cache, so that others meet it in another order."""
    for order in (["compress"], ["compress", "expand"], ["compress", "expand"]):
        command = [sys.executable, "-c", USE_THE_CACHE, *order]
        cached = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run(command, env=cached, check=True, timeout=120)
    assert list(tmp_path.rglob("*.nbc"))


@pytest.mark.long
def test_another_cpu_a_forked_child_and_the_next_process_compute_the_same(tmp_path: Path) -> None:
    """Without AVX-512, in processes of their own; the next one finds all code compiled."""
    script = """
import os, torch
from samo.kernels import cpu, cpu_masks
from tests.kernels.cases import KINDS, assert_as_reference, draw_update

assert not any(cpu_masks._LANES.values())
torch.set_num_threads(2)
torch.manual_seed(0)

def check():
    for kind in KINDS:
        ours = draw_update(100_001, 0.1, kind, 3)
        # torch's root is 1 ulp off, and three more roundings may differ: up to 8 ulp of the change.
        # With AVX-512 the bits are the same: 4 ulp in one of 60 draws.
        assert_as_reference(cpu, [ours])
        if ours.dense is not None:
            out = torch.ones_like(ours.param, dtype=ours.dense.dtype)
            cpu.compress_(ours.dense, ours.mask, out)
            assert torch.equal(out, ours.param.to(out.dtype))
        assert not cpu.find_nonfinite([ours.grad, ours.param])

check()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as a data loader's worker does: torch's own operations need it
    check()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
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


def test_samo_works_where_numba_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(torch.device("cpu")) is cpu
    # As where neither the package nor the home folder is writable.
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert not cpu_masks._can_cache()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.delitem(sys.modules, "samo.kernels.cpu")
    monkeypatch.delattr(_kernels, "cpu")
    assert choose(torch.device("cpu")) is reference
