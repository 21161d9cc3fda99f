"""Checkpoints of models whose rows lie on several ranks (FSDP2), beside those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import samo
from samo.errors import CheckpointError
from tests.ranks import run_ranks

ROWS = 8


def build(sizes: tuple[int, ...] = ()) -> nn.Module:
    """Return a small model; with sizes of a mesh, sharded over its last axis and copied along the others."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5, bias=False)]
    model = nn.Sequential(*layers).double()
    if sizes:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "rows")[-len(sizes) :])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def learn(model: nn.Module, opt: torch.optim.Optimizer, rows: slice, start: int, stop: int) -> None:
    """Take steps on this rank's rows of the batches; FSDP2 averages over equal parts."""
    for step in range(start, stop):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 6, generator=draw, dtype=torch.float64)
        opt.zero_grad()
        model(x[rows]).square().mean().backward()
        opt.step()


def part(rank: int, num_ranks: int) -> slice:
    return slice(ROWS * rank // num_ranks, ROWS * (rank + 1) // num_ranks)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("data-*/*.safetensors")):
        found.update({f"{file.name}:{name}": t for name, t in load_file(file).items()})
    return found


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        # Sums of halves of a batch are rounded otherwise than those of all of it.
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-12, msg=name)


def go_on(rank: int, num_ranks: int, folder: Path, sizes: tuple[int, ...], out: Path) -> None:
    model = build(sizes)
    opt = optimizer(model)
    # Its root stays whole after a forward pass until a backward pass comes.
    model(torch.zeros(1, 6, dtype=torch.float64))
    assert samo.load(folder, model, opt, mesh=None) == {"step": 3}
    assert all(isinstance(s["exp_avg"], DTensor) for s in opt.state.values())
    learn(model, opt, part(rank, num_ranks), 3, 5)
    model(torch.zeros(1, 6, dtype=torch.float64))
    samo.save(out, model, opt, extra={"step": 5})


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_rows_of_ranks_are_saved_as_one_process_would_and_go_on_anywhere(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    model = build()
    opt = optimizer(model)
    learn(model, opt, slice(None), 0, 3)
    samo.save(tmp_path / "begun", model, opt, extra={"step": 3})
    learn(model, opt, slice(None), 3, 5)
    samo.save(tmp_path / "one", model, opt, extra={"step": 5})
    num_ranks = torch.Size(sizes).numel()
    run_ranks(num_ranks, go_on, tmp_path / "begun", sizes, tmp_path / "many")
    assert_close(tensors(tmp_path / "one"), tensors(tmp_path / "many"))
    again = build()
    other = optimizer(again)
    assert samo.load(tmp_path / "many", again, other) == {"step": 5}
    assert_close(dict(model.named_parameters()), dict(again.named_parameters()))


def fill_dense(rank: int, num_ranks: int, folder: Path) -> bool:
    model = build((num_ranks,))
    samo.load(folder, model)
    found = {name: param.full_tensor() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    expected = build()
    samo.load(folder, expected)
    return all(torch.equal(found[name], param) for name, param in expected.named_parameters())


def test_a_compressed_checkpoint_fills_rows_of_a_dense_model(tmp_path: Path) -> None:
    model = build()
    samo.compress_(model, samo.prune(model, 0.5))
    samo.save(tmp_path / "run", model)
    assert all(run_ranks(2, fill_dense, tmp_path / "run"))


def columns(rank: int, num_ranks: int, folder: Path) -> str:
    model: Any = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (num_ranks,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(
        CheckpointError, match=r"'weight' is a .*; a checkpoint holds plain"
    ) as found:
        samo.save(folder, model)
    return str(found.value)


def test_what_is_cut_otherwise_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, columns, tmp_path / "run")
    assert "torch.distributed.checkpoint" in first
    assert "cut into rows along one axis" in second
