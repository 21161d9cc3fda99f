"""Parameters in the middle of their training, and comparisons of what kernels make of them."""

import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor

from samo.kernels import AdamWSettings, AdamWUpdate, Kernels, choose, cpu, lean, reference
from samo.kernels.rounding import join, master_dtype, split, to_correction
from samo.mask.mask import Mask
from tests.meters import assert_ulps

SETTINGS = AdamWSettings(0.9, 0.95, 1e-8)

IMPLEMENTATIONS: dict[str, Kernels] = {"reference": reference, "cpu": cpu}
# Triton's kernels run on CPU tensors here, in its interpreter (see conftest.py), or on a GPU's.
DEVICES: dict[str, torch.device] = {}
if importlib.util.find_spec("triton") is not None:
    IMPLEMENTATIONS["triton"] = choose(torch.device("cpu"), "triton")
    if torch.cuda.is_available():
        DEVICES["triton"] = torch.device("cuda")

Kind = tuple[torch.dtype, torch.dtype, torch.dtype | None]
State = Literal["exact", "ages", "lean"]

# Parameters, gradients and dense copies; the first ones are what compress_ makes.
KINDS: list[Kind] = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, None),
    (torch.float64, torch.float64, torch.float64),
    (torch.float64, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, None),
]
LEAN_KINDS = [kind for kind in KINDS if kind[0] != torch.float64]


def is_triton(kernels: Kernels) -> bool:
    return kernels is IMPLEMENTATIONS.get("triton")


def is_interpreted(kernels: Kernels) -> bool:
    return is_triton(kernels) and not torch.cuda.is_available()


def affordable(kernels: Kernels, numel: int) -> int:
    """The interpreter takes some 10 ms for each block: two must do."""
    return min(numel, 2_503) if is_interpreted(kernels) else numel


def draw_keep(numel: int, density: float | str | None) -> Tensor:
    if density == "one":
        keep = torch.zeros(numel, dtype=torch.bool)
        keep[numel // 2 : numel // 2 + 1] = True
        return keep
    return torch.rand(numel) < (2.0 if density is None else float(density))


def draw_update(
    keep: Tensor | int,
    density: float | None = 0.1,
    kind: Kind = KINDS[0],
    step: int = 0,
    state: State = "exact",
    **changes: Any,
) -> AdamWUpdate:
    """Return an update of a weight that keeps these entries; unpruned without a density."""
    dtype, grad_dtype, dense_dtype = kind
    if isinstance(keep, int):
        keep = draw_keep(keep, density)
    mask = None if density is None else Mask.from_bool(keep)
    numel, kept, wide = keep.numel(), int(keep.sum()), master_dtype(dtype)
    values, remainder = split(torch.randn(kept, dtype=wide), dtype)
    dense = None
    if dense_dtype is not None:
        dense = torch.zeros(numel, dtype=dense_dtype)
        dense[keep] = values.to(dense_dtype)
    size = 0.01 * torch.rand(kept) ** (24 if state == "lean" else 1)  # so that some codes are small
    exp_avg = (torch.randn(kept) * size).to(wide)
    update = AdamWUpdate(
        values,
        remainder,
        (torch.randn(kept) * size).to(grad_dtype),
        exp_avg,
        exp_avg.square() + 1e-6 * (state != "lean"),
        torch.tensor(float(step)),
        0.01,
        0.1,
        dense,
        mask,
    )
    if state == "ages" and mask is not None:
        ages = torch.randint(0, reference.OLDEST + 1, (kept,), dtype=torch.int16)
        ages[:3] = reference.OLDEST
        update = update._replace(age=ages)
    if state == "lean":
        groups = lean.group_numbers(numel, None if mask is None else keep, values.device)
        codes = lean.quantise(exp_avg, update.exp_avg_sq, groups, lean.num_groups(numel, mask))
        update = update._replace(
            exp_avg=codes.exp_avg_Z,
            exp_avg_sq=codes.exp_avg_sq_Z,
            exp_avg_scale=codes.exp_avg_scale_G,
            exp_avg_sq_scale=codes.exp_avg_sq_scale_G,
        )
        if remainder is not None:
            update = update._replace(remainder=to_correction(remainder, 0x80))
    return update._replace(**changes)


def assert_as_reference(
    kernels: Kernels,
    updates: list[AdamWUpdate],
    settings: AdamWSettings = SETTINGS,
    skip: Tensor | None = None,
    *,
    at_most: int = 4,
) -> None:
    """Update parameters together, and compare with the reference, which updates them one by one."""
    expected = [copy_of(update) for update in updates]
    before = [master_of(update) for update in updates]
    kernels.adamw_(updates, settings, skip)
    for ours, theirs, old in zip(updates, expected, before):
        reference.adamw_([theirs], settings, None)  # without a look at ``skip``
        assert_same(ours, theirs, old, at_most=at_most)


def copy_of(update: AdamWUpdate) -> AdamWUpdate:
    return AdamWUpdate(*(part.clone() if isinstance(part, Tensor) else part for part in update))


def tensors_of(update: AdamWUpdate) -> dict[str, Tensor]:
    return {name: part for name, part in update._asdict().items() if isinstance(part, Tensor)}


def master_of(update: AdamWUpdate) -> Tensor:
    return join(update.param.reshape(-1), update.remainder)


def assert_copied(update: AdamWUpdate) -> None:
    """Check that a dense copy has the parameter, rounded as torch rounds, and zeros."""
    if update.dense is None:
        return
    expected = torch.zeros_like(update.dense, memory_format=torch.contiguous_format)
    keep = torch.ones_like(expected, dtype=torch.bool)
    if update.mask is not None:
        keep = update.mask.to_bool().view(expected.shape)
    expected[keep] = update.param.reshape(-1).to(expected.dtype)
    assert torch.equal(update.dense, expected)


def assert_same(ours: AdamWUpdate, theirs: AdamWUpdate, before: Tensor, *, at_most: int) -> None:
    """Compare with the reference, within roundings.

    Triton's interpreter rounds a multiply-add twice, so an 8-bit code may differ where the last
    digit carries x + dither over an integer: once in thousands.
    """
    assert_copied(ours)
    assert ours.step == theirs.step
    if not ours.is_lean:
        assert_ulps(master_of(ours), master_of(theirs), before, at_most=at_most)
        digit = 4 * torch.finfo(ours.exp_avg.dtype).eps
        torch.testing.assert_close(ours.exp_avg, theirs.exp_avg, rtol=digit, atol=0.06 * digit)
        torch.testing.assert_close(ours.exp_avg_sq, theirs.exp_avg_sq, rtol=2 * digit, atol=0)
        if ours.age is not None and theirs.age is not None:
            assert torch.equal(ours.age, theirs.age)
        return
    expected = tensors_of(theirs)
    for name, found in tensors_of(ours).items():
        if not found.is_floating_point():
            differences = (found.int() - expected[name].int()).abs()
            assert int((differences > 0).sum()) <= 1 + 0.002 * found.numel(), name
            assert differences.numel() == 0 or int(differences.max()) <= 1, name
        elif name != "dense":
            digit = 4 * torch.finfo(found.dtype).eps
            torch.testing.assert_close(found, expected[name], rtol=digit, atol=digit * 0.1)
