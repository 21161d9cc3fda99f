"""samo bench kernels: what each operation does, and rows of what does not fit."""

import pytest
import torch

from samo.bench import kernels
from samo.bench.kernels import Problem, floor_bytes, random_mask, tabulate
from samo.bench.rows import Row
from samo.bench.settings import KernelsConfig

CPU = torch.device("cpu")


def test_operations_touch_what_their_floors_count() -> None:
    problem = Problem(2**12, 0.1, CPU)
    mask = problem.mask
    assert abs(mask.kept / mask.numel - 0.1) < 0.03
    assert mask == random_mask(2**12, 0.1, CPU)
    touched = [problem.source, problem.grad_Z, mask.words]
    assert floor_bytes("compress", 2**12, mask.kept) == sum(t.nbytes for t in touched)
    update = problem.operation("update, exact")
    weight = problem.models[0].weight.detach()
    before = weight.clone()
    update()
    changed = weight != before
    assert changed.any()
    assert not changed[~mask.to_bool()].any()
    problem.target.fill_(7)
    problem.operation("update, dense")()
    assert (problem.target - problem.source).abs().max() < 0.01


def test_what_does_not_fit_into_memory_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")

    config = KernelsConfig(sizes=(12,), densities=(0.1,), repeats=1)
    monkeypatch.setattr(Problem, "_dense_step", refuse)
    found = kernels.measure(config, CPU, lambda _: None, lambda _: None)
    failed = {row.name: row.failure for row in found if row.failure is not None}
    assert failed == {"update, dense": "out of memory: CUDA out of memory"}
    assert {"copy", "compress", "expand", "update, exact"} <= {row.name for row in found}
    monkeypatch.setattr(kernels, "Problem", refuse)
    found = kernels.measure(config, CPU, lambda _: None, lambda _: None)
    assert [row.failure for row in found] == ["out of memory: CUDA out of memory"]


def test_linearity_compares_with_the_largest_size_of_the_same_density() -> None:
    def row(numel: int, density: float, ns: float) -> Row:
        figures = {"floor_ms": 1.0, "times_floor": 1.0, "ns_per_weight": ns}
        sizes = {"numel": numel, "density": density}
        return Row(name="copy", parameters=sizes, median=1.0, p20=1.0, p80=1.0, figures=figures)

    failed = Row(name="copy", parameters={"numel": 32, "density": 0.2}, failure="too large")
    table = tabulate([row(16, 0.1, 0.3), row(16, 0.2, 0.1), row(32, 0.1, 0.2), failed])
    assert [line[-1] for line in table.lines] == ["1.50", "1.00", "1.00"]
