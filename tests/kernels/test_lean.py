"""8-bit optimizer state: its codes, and what an update makes of them.

What all updates have in common is tested in test_kernels.py.
"""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings as examples, strategies as st

from samo.kernels import AdamWSettings, AdamWUpdate, Kernels, cpu, lean, reference
from samo.kernels.reference import adamw_values, count_step
from samo.kernels.rounding import split, to_correction
from tests.kernels.cases import (
    KINDS,
    SETTINGS,
    assert_as_reference,
    assert_copied,
    assert_same,
    copy_of,
    draw_keep,
    draw_update,
    is_triton,
    master_of,
    tensors_of,
)

BF16, FP32 = KINDS[7], KINDS[3]


def moments_of(update: AdamWUpdate) -> lean.Moments:
    assert update.exp_avg_scale is not None
    assert update.exp_avg_sq_scale is not None
    return lean.Moments(
        update.exp_avg, update.exp_avg_sq, update.exp_avg_scale, update.exp_avg_sq_scale
    )


# The codes ---------------------------------------------------------------------------------------

drawn_moments = st.lists(
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


@examples(max_examples=60)
@given(drawn_moments, st.booleans())
def test_moments_come_back_within_a_code(drawn: Drawn, is_dithered: bool) -> None:
    exp_avg, root, groups, bits = (torch.tensor(column) for column in zip(*drawn))
    exp_avg_sq = root.square()
    codes = lean.quantise(exp_avg, exp_avg_sq, groups, 4, bits if is_dithered else None)
    new_exp_avg, new_exp_avg_sq = lean.dequantise(codes, groups)
    assert not (new_exp_avg.sign() * exp_avg.sign() < 0).any()
    bound = 1.0 if is_dithered else 0.5
    for old, new, scale, most in (
        (exp_avg.abs(), new_exp_avg.abs(), codes.exp_avg_scale_G, 127),
        (root, new_exp_avg_sq.sqrt(), codes.exp_avg_sq_scale_G, 255),
    ):
        part = scale[groups].double()
        # 1e-4: rounding in fp32 of codes up to 255. A nonzero root has at least code 1.
        steps = ((old / part) ** 0.25 - (new / part) ** 0.25).nan_to_num().abs() * most
        is_small = (most == 255) & ((new / part) ** 0.25 * most < 1.5)
        assert bool(((steps <= bound + 1e-4) | (is_small & (steps <= 1.0001))).all())
    # A second moment is 0 only if it was.
    assert torch.equal(codes.exp_avg_sq_Z > 0, exp_avg_sq > 0)
    assert torch.equal(new_exp_avg_sq > 0, exp_avg_sq > 0)
    # Codes of codes are the same codes, whatever the dither.
    for dither in (None, bits, bits.flip(0) ^ 0xFFFFFFFF):
        again = lean.quantise(new_exp_avg, new_exp_avg_sq, groups, 4, dither)
        assert all(torch.equal(old, new) for old, new in zip(codes, again))


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
    # Five standard deviations of the mean of 1,024 codes, 0.016.
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


# Corrections -------------------------------------------------------------------------------------


@examples(max_examples=50)
@given(st.integers(-0x8000, 0x7FFF), st.integers(0, 0xFF))
def test_a_correction_is_the_upper_half_of_a_remainder(remainder: int, dither: int) -> None:
    whole = torch.tensor([remainder], dtype=torch.int16)
    nearest = to_correction(whole, 0x80)
    assert abs(int(nearest) * 256 - remainder) <= (0x80 if remainder < 0x7F80 else 0xFF)
    dithered = to_correction(whole, torch.tensor([dither]))
    assert abs(int(dithered) * 256 - remainder) <= 0xFF
    back = nearest.to(torch.int16) << 8
    assert torch.equal(to_correction(back, dither), nearest)  # whatever the dither


def test_a_change_below_the_correction_arrives_on_average(kernels: Kernels) -> None:
    # One unit of the correction at 1.0 is 2**-15; a step here is a sixteenth of it.
    changes = {"lr": 2.0**-19, "weight_decay": 0.0}
    update = draw_update(2048, None, KINDS[8], state="lean", **changes)
    for tensor in tensors_of(update).values():
        tensor.zero_()
    update.param.fill_(1.0)
    update.grad.fill_(1.0)
    kernels.adamw_([update], AdamWSettings(0.0, 0.9, 0.0), None)
    change = 1 - master_of(update).double().mean()
    assert 0.75 < float(change) / 2**-19 < 1.25


# The update --------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.01, None], ids=str)
def test_an_update_is_adamw_between_codes(density: float | None) -> None:
    """All at once here; the update walks in pieces of 2**20 entries."""
    numel = 2**20 + 3001
    keep = draw_keep(numel, density)
    ours = draw_update(keep, density, BF16, 3, "lean")
    update = copy_of(ours)
    reference.adamw_([ours], SETTINGS, None)

    groups = lean.group_numbers(numel, None if density is None else keep, torch.device("cpu"))
    codes = moments_of(update)
    moments, corrections = lean.dequantise(codes, groups), count_step(update, SETTINGS, None)
    # A whole weight at once gives the same codes, rounded to nearest.
    nearest = lean.quantise_weight(*moments, numel, update.mask)
    assert all(torch.equal(a, b) for a, b in zip(codes, nearest))
    master, exp_avg, exp_avg_sq = adamw_values(
        master_of(update), update.grad.float(), *moments, corrections, SETTINGS
    )
    bits = lean.random_bits(0, update.param.numel(), update.step)
    expected = lean.quantise(exp_avg, exp_avg_sq, groups, codes[2].numel(), bits)
    values, remainder = split(master, torch.bfloat16)
    assert remainder is not None
    assert all(torch.equal(a, b) for a, b in zip(moments_of(ours), expected))
    assert torch.equal(ours.param, values)
    assert ours.remainder is not None
    assert torch.equal(ours.remainder, to_correction(remainder, bits & 0xFF))
    assert_copied(ours)


def test_many_items_equal_the_reference(kernels: Kernels) -> None:
    sizes = ((255, None), (257, None), (8200, 0.02), (5000, None))
    updates = [draw_update(numel, density, BF16, 3, "lean") for numel, density in sizes]
    assert_as_reference(kernels, updates)


@pytest.mark.parametrize(
    ("counts", "slots"), [((64, 0), 256), ((2048, 1), 128), ((1300, 200), 256)], ids=str
)
def test_whatever_a_block_keeps(
    kernels: Kernels, counts: tuple[int, int], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = torch.zeros(len(counts), 2048, dtype=torch.bool)
    for row, count in zip(keep, counts):
        row[torch.randperm(2048)[:count]] = True
    if is_triton(kernels):
        monkeypatch.setattr(kernels, "lean_slots", lambda masks: slots)  # up to 8 rounds
    update = draw_update(keep.view(-1), 0.1, BF16, 3, "lean")
    assert update.dense is not None
    update.dense.fill_(float("nan"))
    assert_as_reference(kernels, [update])


def test_what_gets_no_gradient_any_more_comes_to_rest() -> None:
    """With codes rounded to nearest it would not, while the rest of its group still trains."""
    keep = torch.ones(64, dtype=torch.bool)
    ours = draw_update(keep, 1.0, FP32, 1000, "lean", lr=0.0, weight_decay=0.0)
    steps, groups = 80, torch.zeros(64, dtype=torch.int64)
    ours.exp_avg[1:] = 12  # half a code is 17 % of it, and its decay in a step 10 %
    ours.exp_avg_sq[1:] = 200  # 1 %, and 0.5 %
    before, before_sq = lean.dequantise(moments_of(ours), groups)
    ours.grad.zero_()
    ours.grad[0] = 0.1
    for _ in range(steps):
        reference.adamw_([ours], AdamWSettings(0.9, 0.99, 1e-8), None)
    exp_avg, exp_avg_sq = lean.dequantise(moments_of(ours), groups)
    assert float(exp_avg[1:].mean() / before[1:].mean()) < 0.02  # 0.0002 in fp32
    # The mean of 63 walks of some 20 codes each.
    assert float((exp_avg_sq[1:] / before_sq[1:]).sqrt().mean()) == pytest.approx(
        0.99 ** (steps / 2), rel=0.05
    )


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("density", [0.5, None], ids=["pruned", "unpruned"])
def test_gradients_whose_squares_overflow_leave_weights_finite(
    kernels: Kernels, density: float | None
) -> None:
    update = draw_update(600, density, FP32, 3, "lean")
    update.grad[3] = 3e38
    for _ in range(2):
        kernels.adamw_([update], SETTINGS, None)
        update.grad.fill_(0.01)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors_of(update).values())
    assert float(update.param.abs().max()) < 10


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, as above
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")], ids=str)
@pytest.mark.parametrize("density", [0.5, None], ids=["pruned", "unpruned"])
def test_a_nonfinite_gradient_spoils_one_weight_as_in_the_reference(
    kernels: Kernels, density: float | None, bad: float
) -> None:
    """samo.AdamW skips such a step, and nobody else need do so."""
    ours = draw_update(600, density, FP32, 3, "lean")
    ours.grad[3] = bad
    theirs, before = copy_of(ours), master_of(ours)
    kernels.adamw_([ours], SETTINGS, None)
    reference.adamw_([theirs], SETTINGS, None)
    assert ours.param.isnan().nonzero().tolist() == theirs.param.isnan().nonzero().tolist() == [[3]]
    assert (int(ours.exp_avg[3]), int(ours.exp_avg_sq[3])) == (0, 255)
    for update in (ours, theirs):
        update.param[3] = update.grad[3] = 0.0  # to be compared
    assert_same(ours._replace(dense=None), theirs, before, at_most=4)


@pytest.mark.parametrize("density", [0.1, None], ids=["pruned", "unpruned"])
@pytest.mark.parametrize("kind", [BF16, FP32], ids=["bf16", "fp32"])
def test_a_cpu_does_not_leave_it_to_the_slow_reference(
    kind: Any, density: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = draw_update(5000, density, kind, 3, "lean")
    theirs = copy_of(ours)
    reference.adamw_([theirs], SETTINGS, None)
    left: list[AdamWUpdate] = []
    monkeypatch.setattr(reference, "adamw_", lambda updates, *_: left.extend(updates))
    cpu.adamw_([ours], SETTINGS, None)
    assert left == []
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "step")
    assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in names)


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
