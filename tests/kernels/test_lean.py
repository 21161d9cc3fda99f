"""8-bit optimizer state: its codes, its update in plain torch and in Triton's kernels."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings as examples, strategies as st
from torch import Tensor

from samo.kernels import (
    AdamWSettings,
    AdamWUpdate,
    LeanKernels,
    LeanUpdate,
    choose_lean,
    lean,
    reference,
)
from samo.kernels.corrections import count_step
from samo.kernels.reference import adamw_values
from samo.kernels.rounding import convert_rest, join, rest_dtype, split
from samo.mask.mask import Mask

ROOT = Path(__file__).parents[2]
SETTINGS = AdamWSettings(0.9, 0.95, 1e-8)
# Parameters, gradients and dense copies.
KINDS: list[tuple[torch.dtype, torch.dtype, torch.dtype | None]] = [
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.float32, torch.float16),
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
]

IMPLEMENTATIONS: dict[str, LeanKernels] = {"reference": lean}
DEVICES: dict[str, torch.device] = {}
if importlib.util.find_spec("triton") is not None:
    IMPLEMENTATIONS["triton"] = choose_lean(torch.device("cpu"), "triton")
    if torch.cuda.is_available():
        DEVICES["triton"] = torch.device("cuda")

needs_triton = pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="needs triton")


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest) -> Iterator[LeanKernels]:
    with torch.device(DEVICES.get(request.param, torch.device("cpu"))):
        yield IMPLEMENTATIONS[request.param]


@pytest.fixture
def triton() -> Iterator[Any]:
    with torch.device(DEVICES.get("triton", torch.device("cpu"))):
        yield IMPLEMENTATIONS["triton"]


def draw(
    keep: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    dense_dtype: torch.dtype | None = torch.bfloat16,
    *,
    step: int = 3,
    numel: int = 0,
) -> LeanUpdate:
    """A parameter in the middle of its training; unpruned without ``keep``."""
    mask = None if keep is None else Mask.from_bool(keep)
    whole = torch.ones(numel, dtype=torch.bool) if keep is None else keep
    kept = int(whole.sum())
    values, rest = split(torch.randn(kept), dtype)
    if rest is not None:
        wanted = rest_dtype(dtype, is_lean=True)
        assert wanted is not None
        rest = convert_rest(rest, wanted)
    dense = None
    if dense_dtype is not None:
        dense = torch.zeros(whole.numel(), dtype=dense_dtype)
        dense[whole] = values.to(dense_dtype)
    size = 0.01 * torch.rand(kept) ** 24  # so that some have the smallest codes
    exp_avg = torch.randn(kept) * size
    exp_avg_sq = (torch.randn(kept) * size).square()
    groups = lean.group_numbers(whole.numel(), keep, values.device)
    codes = lean.quantise(exp_avg, exp_avg_sq, groups, lean.num_groups(whole.numel(), mask))
    update = AdamWUpdate(
        values,
        rest,
        (torch.randn(kept) * size).to(grad_dtype or dtype),
        codes[0],
        codes[1],
        torch.tensor(float(step)),
        0.01,
        0.1,
        dense,
        mask,
    )
    return LeanUpdate(update, codes[2], codes[3])


def copy_of(lean_update: LeanUpdate) -> LeanUpdate:
    update = AdamWUpdate(
        *(part.clone() if isinstance(part, Tensor) else part for part in lean_update.update)
    )
    return LeanUpdate(update, *(scale.clone() for scale in lean_update[1:]))


def tensors_of(lean_update: LeanUpdate) -> dict[str, Tensor]:
    update, exp_avg_scale, exp_avg_sq_scale = lean_update
    parts = update._asdict() | {
        "exp_avg_scale": exp_avg_scale,
        "exp_avg_sq_scale": exp_avg_sq_scale,
    }
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def assert_copied(lean_update: LeanUpdate) -> None:
    """Demand that a dense copy holds the parameter, rounded as torch rounds, and zeros."""
    update = lean_update.update
    if update.dense is not None:
        expected = torch.empty_like(update.dense)
        reference.expand_(update.param, update.mask, expected)
        assert torch.equal(update.dense, expected)


def assert_same(ours: LeanUpdate, theirs: LeanUpdate) -> None:
    """Demand equal bits, but for what one rounding of fp32 can do.

    Triton's interpreter rounds a multiply-add twice, so that values differ in their last digit. A code
    is then another one where that digit carries x + dither over a whole number: once in thousands.
    """
    expected = tensors_of(theirs)
    assert_copied(ours)
    for name, ours_now in tensors_of(ours).items():
        theirs_now = expected[name]
        if name in ("rest", "exp_avg", "exp_avg_sq") and ours_now.dtype != torch.float32:
            differences = (ours_now.int() - theirs_now.int()).abs()
            assert int((differences > 0).sum()) <= 1 + 0.002 * ours_now.numel(), name
            assert differences.numel() == 0 or int(differences.max()) <= 1, name
        else:
            digit = torch.finfo(ours_now.dtype).eps
            torch.testing.assert_close(ours_now, theirs_now, rtol=4 * digit, atol=4 * digit * 0.01)


# The codes ---------------------------------------------------------------------------------------

moments = st.lists(
    st.tuples(
        st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
        st.just(0.0) | st.floats(2.0**-20, 1e6, width=32),  # of less, the square may vanish
        st.integers(0, 3),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=40,
)
Drawn = list[tuple[float, float, int, int]]


def as_tensors(drawn: Drawn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exp_avg, root, groups, bits = zip(*drawn)
    return (
        torch.tensor(exp_avg),
        torch.tensor(root).square(),
        torch.tensor(groups),
        torch.tensor(bits),
    )


@examples(max_examples=100)
@given(moments, st.booleans())
def test_moments_come_back_within_a_code(drawn: Drawn, is_dithered: bool) -> None:
    exp_avg, exp_avg_sq, groups, bits = as_tensors(drawn)
    codes = lean.quantise(exp_avg, exp_avg_sq, groups, 4, bits if is_dithered else None)
    new_exp_avg, new_exp_avg_sq = lean.dequantise(codes, groups)
    assert torch.equal(new_exp_avg.sign() * exp_avg.sign() < 0, torch.zeros_like(groups).bool())
    bound = 1.0 if is_dithered else 0.5
    for old, new, scale, most in (
        (exp_avg.abs(), new_exp_avg.abs(), codes.exp_avg_scale_G, 127),
        (exp_avg_sq.sqrt(), new_exp_avg_sq.sqrt(), codes.exp_avg_sq_scale_G, 255),
    ):
        part = scale[groups].double()
        # 1e-4: rounding in fp32 of codes up to 255. A root that is not 0 has at least code 1.
        steps = ((old / part) ** 0.25 - (new / part) ** 0.25).nan_to_num().abs() * most
        is_small = (most == 255) & ((new / part) ** 0.25 * most < 1.5)
        assert bool(((steps <= bound + 1e-4) | (is_small & (steps <= 1.0001))).all())


@examples(max_examples=100)
@given(moments)
def test_a_second_moment_is_0_only_if_it_was(drawn: Drawn) -> None:
    exp_avg, exp_avg_sq, groups, bits = as_tensors(drawn)
    for dither in (None, bits):
        codes = lean.quantise(exp_avg, exp_avg_sq, groups, 4, dither)
        is_there = codes.exp_avg_sq_Z > 0
        assert torch.equal(is_there, exp_avg_sq > 0)
        assert torch.equal(lean.dequantise(codes, groups)[1] > 0, is_there)


@examples(max_examples=100)
@given(moments)
def test_codes_of_codes_are_the_same_codes(drawn: Drawn) -> None:
    exp_avg, exp_avg_sq, groups, bits = as_tensors(drawn)
    codes = lean.quantise(exp_avg, exp_avg_sq, groups, 4, bits)
    for dither in (None, bits, bits.flip(0) ^ 0xFFFFFFFF):
        again = lean.quantise(*lean.dequantise(codes, groups), groups, 4, dither)
        for old, new in zip(codes, again):
            assert torch.equal(old, new)


def test_a_group_without_entries_has_scale_0() -> None:
    codes = lean.quantise(torch.ones(2), torch.ones(2), torch.tensor([0, 2]), 4)
    assert codes.exp_avg_scale_G.tolist() == codes.exp_avg_sq_scale_G.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("density", [0.01, None], ids=str)
def test_a_whole_weight_is_quantised_as_its_pieces_are(density: float | None) -> None:
    numel = 2**20 + 3001
    keep = None if density is None else torch.rand(numel) < density
    mask = None if keep is None else Mask.from_bool(keep)
    groups = lean.group_numbers(numel, keep, torch.device("cpu"))
    exp_avg, root = torch.randn(groups.numel()), torch.randn(groups.numel())
    found = lean.quantise_weight(exp_avg, root.square(), numel, mask)
    expected = lean.quantise(exp_avg, root.square(), groups, lean.num_groups(numel, mask))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected))


def test_dithered_codes_have_the_right_mean() -> None:
    exp_avg = torch.tensor([1.0, 0.3, -0.07, 1e-3, -1e-9])
    root = torch.tensor([1.0, 0.3, 0.07, 1e-3, 1e-11])
    groups, count = torch.zeros(5, dtype=torch.int64), 1024
    sums = torch.zeros(2, 5)
    for step in range(count):
        bits = lean.random_bits(100, 105, torch.tensor(float(step)))
        codes = lean.quantise(exp_avg, root.square(), groups, 1, bits)
        sums += torch.stack([codes.exp_avg_Z.float(), codes.exp_avg_sq_Z.float()])
    means = sums / count
    # The mean of 1,024 codes, each with a standard deviation of up to 0.5: 0.016, and five of these.
    expected = exp_avg.sign() * exp_avg.abs() ** 0.25 * 127
    torch.testing.assert_close(means[0], expected, rtol=0, atol=0.08)
    torch.testing.assert_close(means[1, :4], root[:4] ** 0.25 * 255, rtol=0, atol=0.08)
    assert means[1, 4] == 1  # 0.45, but never 0


def test_random_bits_differ_between_entries_and_steps() -> None:
    rows = torch.stack(
        [lean.random_bits(5, 5 + 4096, torch.tensor(s)) for s in (0.0, 1.0, 2.0, 1e6)]
    )
    assert rows.unique().numel() > 0.999 * rows.numel()
    assert bool((rows >= 0).all() and (rows < 2**32).all())
    shares = torch.stack([(rows >> bit & 1).float().mean(1) for bit in range(32)])
    assert bool(((shares - 0.5).abs() < 0.04).all())  # five standard deviations of 4096 coins
    for first, second in ((0, 1), (1, 2)):
        same = ((rows[first] ^ rows[second]) >> 20 & 0xFFF).float().mean() / 0xFFF
        assert abs(float(same) - 0.5) < 0.03


# Corrections -------------------------------------------------------------------------------------


@examples(max_examples=100)
@given(st.integers(-0x8000, 0x7FFF), st.integers(0, 0xFF))
def test_a_correction_is_the_upper_half_of_a_remainder(rest: int, dither: int) -> None:
    remainder = torch.tensor([rest], dtype=torch.int16)
    nearest = convert_rest(remainder, torch.int8)
    assert abs(int(nearest) * 256 - rest) <= (0x80 if rest < 0x7F80 else 0xFF)
    dithered = convert_rest(remainder, torch.int8, torch.tensor([dither]))
    assert abs(int(dithered) * 256 - rest) <= 0xFF
    back = convert_rest(nearest, torch.int16)
    assert int(back) == int(nearest) * 256
    assert torch.equal(convert_rest(back, torch.int8, dither), nearest)  # whatever the dither


def test_a_master_has_24_bits_of_fp32s_32() -> None:
    master = torch.randn(1000)
    values, rest = split(master, torch.bfloat16)
    assert rest is not None
    correction = convert_rest(rest, torch.int8)
    joined = join(values, correction)
    assert torch.equal(joined, join(values, convert_rest(correction, torch.int16)))
    # 2**-16 is half of the last of 24 bits, and 2**-15 what is lost at most where the top is cut off.
    assert float((joined / master - 1).abs().max()) <= 2**-15
    assert float((joined / master - 1).abs().mean()) < 2**-17


def test_a_change_below_the_correction_arrives_on_average(kernels: LeanKernels) -> None:
    update = draw(None, torch.bfloat16, torch.float32, numel=2048)
    update.update.param.fill_(1.0)
    update.update.rest.zero_()  # type: ignore[union-attr]
    update.update.grad.fill_(1.0)
    for part in (update.update.exp_avg, update.update.exp_avg_sq, *update[1:]):
        part.zero_()
    update.update.step.zero_()
    # One unit of the correction at 1.0 is 2**-15; a step here is a sixteenth of it.
    slow = update._replace(update=update.update._replace(lr=2.0**-19, weight_decay=0.0))
    kernels.adamw_lean_([slow], AdamWSettings(0.0, 0.9, 0.0), None)
    change = 1 - join(update.update.param, update.update.rest).double().mean()
    assert 0.75 < float(change) / 2**-19 < 1.25


# The update --------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.01, 0.1, None], ids=str)
def test_an_update_is_adamw_between_codes(density: float | None) -> None:
    """All at once here; the update walks in pieces of 2**20 entries."""
    numel = 2**20 + 3001
    keep = None if density is None else torch.rand(numel) < density
    ours = draw(keep, numel=numel)
    theirs = copy_of(ours)
    lean.adamw_lean_([ours], SETTINGS, None)

    update = theirs.update
    groups = lean.group_numbers(numel, keep, torch.device("cpu"))
    codes = lean.Moments(update.exp_avg, update.exp_avg_sq, *theirs[1:])
    master, exp_avg, exp_avg_sq = adamw_values(
        join(update.param, update.rest),
        update.grad.float(),
        *lean.dequantise(codes, groups),
        count_step(update, SETTINGS, None),
        SETTINGS,
    )
    bits = lean.random_bits(0, update.param.numel(), update.step)
    expected = lean.quantise(exp_avg, exp_avg_sq, groups, theirs[1].numel(), bits)
    values, rest = split(master, torch.bfloat16)
    assert rest is not None
    found = (ours.update.exp_avg, ours.update.exp_avg_sq, *ours[1:])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert torch.equal(ours.update.param, values)
    assert ours.update.rest is not None
    assert torch.equal(ours.update.rest, convert_rest(rest, torch.int8, bits & 0xFF))
    assert_copied(ours)


@needs_triton
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1023, 1025, 2049])
@pytest.mark.parametrize("density", [0.1, 1.0, None], ids=str)
@pytest.mark.parametrize("copy", [torch.bfloat16, None], ids=str)
def test_triton_equals_the_reference_at_ragged_sizes(
    triton: Any, numel: int, density: float | None, copy: torch.dtype | None
) -> None:
    keep = None if density is None else torch.rand(numel) < density
    ours = draw(keep, dense_dtype=copy, numel=numel)
    theirs = copy_of(ours)
    triton.adamw_lean_([ours], SETTINGS, None)
    lean.adamw_lean_([theirs], SETTINGS, None)
    assert_same(ours, theirs)


@needs_triton
def test_triton_gives_each_parameter_its_rate_and_decay(triton: Any) -> None:
    start = [draw(torch.rand(300) < 0.5), draw(None, numel=300)]
    plain = [copy_of(update) for update in start]
    ours, theirs = (
        [
            copy._replace(update=copy.update._replace(lr=lr, weight_decay=decay))
            for copy, lr, decay in zip(map(copy_of, start), (0.04, 0.01), (0.0, 0.1))
        ]
        for _ in range(2)
    )
    triton.adamw_lean_(ours, SETTINGS, None)
    lean.adamw_lean_(theirs, SETTINGS, None)
    lean.adamw_lean_(plain, SETTINGS, None)
    for mine, other in zip(ours, theirs):
        assert_same(mine, other)
    assert not torch.equal(theirs[0].update.param, plain[0].update.param)
    assert torch.equal(theirs[1].update.param, plain[1].update.param)


@needs_triton
def test_triton_equals_the_reference_past_the_first_item(triton: Any) -> None:
    start = [draw(torch.rand(9000) < 0.02), draw(None, numel=5000), draw(torch.rand(8200) < 0.02)]
    ours, theirs = ([copy_of(update) for update in start] for _ in range(2))
    triton.adamw_lean_(ours, SETTINGS, None)
    lean.adamw_lean_(theirs, SETTINGS, None)
    for mine, other in zip(ours, theirs):
        assert_same(mine, other)


@needs_triton
@pytest.mark.parametrize("counts", [(0, 1), (64, 0), (2048, 1), (1300, 200)], ids=str)
def test_triton_equals_the_reference_whatever_a_block_keeps(
    triton: Any, counts: tuple[int, int]
) -> None:
    keep = torch.zeros(len(counts), 2048, dtype=torch.bool)
    for row, count in zip(keep, counts):
        row[torch.randperm(2048)[:count]] = True
    start = draw(keep.view(-1))
    for slots in (128, 256):  # up to 8 rounds, and 4
        ours, theirs = copy_of(start), copy_of(start)
        ours.update.dense.fill_(float("nan"))  # type: ignore[union-attr]
        triton.launch_adamw_lean([ours], SETTINGS, None, slots=slots)
        lean.adamw_lean_([theirs], SETTINGS, None)
        assert_same(ours, theirs)


@pytest.mark.parametrize("is_lr_tensor", [False, True], ids=["lr", "lr tensor"])
@pytest.mark.parametrize("has_skip", [False, True], ids=["", "skip"])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_weights_of_all_kinds_are_updated_together(
    kernels: LeanKernels, is_lr_tensor: bool, has_skip: bool, beta1: float
) -> None:
    updates = []
    for index, (dtype, grad_dtype, copy) in enumerate(KINDS):
        keep = torch.rand(1025) < 0.1
        updates.append(draw(keep, dtype, grad_dtype, copy, step=7 * index))
        updates.append(draw(None, dtype, grad_dtype, copy, step=11 * index, numel=300))
    updates.append(draw(torch.zeros(0, dtype=torch.bool)))
    lr = torch.tensor(0.015625) if is_lr_tensor else 0.015625
    updates = [
        part._replace(update=part.update._replace(lr=lr, weight_decay=0.125)) for part in updates
    ]
    expected = [copy_of(update) for update in updates]
    settings = AdamWSettings(beta1, 0.95, 1e-8)
    kernels.adamw_lean_(updates, settings, torch.tensor(False) if has_skip else None)
    for update in expected:  # one by one, and without a look at ``skip``
        lean.adamw_lean_([update], settings, None)
    for ours, theirs in zip(updates, expected):
        assert ours.update.step == theirs.update.step
        assert_same(ours, theirs)


def test_a_skipped_step_changes_nothing(kernels: LeanKernels) -> None:
    updates = [draw(torch.rand(3000) < 0.1), draw(None, torch.float32, numel=700)]
    for update in updates:
        update.update.dense[7] = 5.0  # type: ignore[index]
    before = [copy_of(update) for update in updates]
    for update in updates:
        update.update.grad.fill_(float("nan"))
    kernels.adamw_lean_(updates, SETTINGS, torch.tensor(True))
    for ours, old in zip(updates, before):
        expected = tensors_of(old)
        for name, tensor in tensors_of(ours).items():
            assert name == "grad" or torch.equal(tensor, expected[name]), name


def test_what_gets_no_gradient_any_more_comes_to_rest() -> None:
    """While the rest of its group trains on, with codes that are rounded to nearest it would not."""
    keep = torch.ones(64, dtype=torch.bool)
    ours = draw(keep, torch.float32, step=1000)
    steps = 80
    ours.update.exp_avg[1:] = 12  # half a code is 17 % of it, and its decay in a step 10 %
    ours.update.exp_avg_sq[1:] = 200  # 1 %, and 0.5 %
    groups = torch.zeros(64, dtype=torch.int64)
    codes = lean.Moments(ours.update.exp_avg, ours.update.exp_avg_sq, *ours[1:])
    before, before_sq = lean.dequantise(codes, groups)
    ours.update.grad.zero_()
    ours.update.grad[0] = 0.1
    still = ours._replace(update=ours.update._replace(lr=0.0, weight_decay=0.0))
    for _ in range(steps):
        lean.adamw_lean_([still], AdamWSettings(0.9, 0.99, 1e-8), None)
    exp_avg, exp_avg_sq = lean.dequantise(codes, groups)  # of the codes as they are now
    assert float(exp_avg[1:].mean() / before[1:].mean()) < 0.02  # 0.0002 in fp32
    # The mean of 63 walks of some 20 codes each.
    assert float((exp_avg_sq[1:] / before_sq[1:]).sqrt().mean()) == pytest.approx(
        0.99 ** (steps / 2), rel=0.05
    )


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, under the interpreter
def test_gradients_whose_squares_overflow_leave_weights_finite(kernels: LeanKernels) -> None:
    for update in (
        draw(torch.rand(600) < 0.5, torch.float32),
        draw(None, torch.float32, numel=300),
    ):
        update.update.grad[3] = 3e38
        for _ in range(2):
            kernels.adamw_lean_([update], SETTINGS, None)
            update.update.grad.fill_(0.01)
        assert all(bool(t.isfinite().all()) for t in tensors_of(update).values())
        assert float(update.update.param.abs().max()) < 10


def test_an_update_follows_strides(kernels: LeanKernels) -> None:
    shape = (8, 6, 3, 3)
    for keep in (torch.rand(432) < 0.3, None):
        ours = draw(keep, torch.float32, numel=432)
        theirs = copy_of(ours)
        assert ours.update.dense is not None
        dense = ours.update.dense.view(shape).to(memory_format=torch.channels_last)
        kernels.adamw_lean_(
            [ours._replace(update=ours.update._replace(dense=dense))], SETTINGS, None
        )
        lean.adamw_lean_([theirs], SETTINGS, None)
        assert_same(ours._replace(update=ours.update._replace(dense=dense.reshape(-1))), theirs)
        assert dense.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["rest", "grad", "exp_avg", "dense", "exp_avg_scale"])
def test_what_has_the_wrong_size_is_named(kernels: LeanKernels, name: str) -> None:
    good = draw(torch.rand(300) < 0.5)
    wrong = torch.cat([tensors_of(good)[name]] * 2)
    if name == "exp_avg_scale":
        bad = good._replace(exp_avg_scale_G=wrong)
    else:
        bad = good._replace(update=good.update._replace(**{name: wrong}))
    with pytest.raises(ValueError, match=f"has the wrong size of {name} "):
        kernels.adamw_lean_([bad], SETTINGS, None)


# How it is launched ------------------------------------------------------------------------------


@needs_triton
def test_launches_do_not_grow_with_the_number_of_weights(
    triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    kind = type(triton.lean_kernels.adamw_lean_all_kernel)
    run = kind.run

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(kind, "run", count)
    for number in (1, 5):
        counts.clear()
        updates = [
            update
            for _ in range(number)
            for update in (draw(torch.rand(300) < 0.1), draw(None, numel=300))
        ]
        triton.adamw_lean_(updates, SETTINGS, torch.tensor(False))
        assert dict(counts) == {
            "adamw_scalars_kernel": 1,
            "adamw_lean_kept_kernel": 1,
            "adamw_lean_all_kernel": 1,
            "expand_rows_kernel": 1,
        }


@needs_triton
def test_slots_follow_the_density(triton: Any) -> None:
    for kept, slots in ((0, 32), (20, 32), (102, 128), (205, 256), (1024, 256)):
        keep = torch.zeros(4096, dtype=torch.bool)
        keep[: 4 * kept] = True
        assert triton.num_slots([draw(keep)]) == slots


@needs_triton
def test_what_the_kernels_do_not_cover_goes_to_the_reference(
    triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = lean.adamw_lean_

    def call(*args: Any) -> None:
        calls.extend([1] * len(args[0]))
        original(*args)

    monkeypatch.setattr(lean, "adamw_lean_", call)
    start = draw(None, numel=300)
    triton.adamw_lean_([start], SETTINGS, None)
    assert not calls
    remainder = torch.zeros(300, dtype=torch.int16)
    for changes in (
        {"rest": None},
        {"rest": remainder},
        {"param": torch.zeros(600, dtype=torch.bfloat16)[::2]},
        {"exp_avg": torch.zeros(600, dtype=torch.int8)[::2]},
    ):
        calls.clear()
        triton.adamw_lean_(
            [start._replace(update=start.update._replace(**changes))], SETTINGS, None
        )
        assert calls == [1], changes


def test_a_cpu_and_a_device_without_triton_take_the_reference() -> None:
    assert choose_lean(torch.device("cpu")) is lean
    assert choose_lean(torch.device("cuda"), "reference") is lean
    if "triton" in IMPLEMENTATIONS:
        assert choose_lean(torch.device("cuda")) is IMPLEMENTATIONS["triton"]


@pytest.mark.long
def test_the_benchmarks_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import lean_codes, lean_gpt

    monkeypatch.setattr(sys, "argv", ["lean_codes", "--steps", "12"])
    lean_codes.main()
    assert "| fourth powers, dithered (samo) |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["lean_gpt", "--steps", "1", "--seeds", "1"])
    lean_gpt.main()
    assert "| 0.95 | 0 |" in capsys.readouterr().out
