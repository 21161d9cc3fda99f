"""Tensors whose rows lie on several ranks: DTensors, as FSDP2 makes them of parameters.

A checkpoint has them whole. Each rank gives its rows when the one that writes asks for them, and takes its
rows of what is read.
"""

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = []


class Piece(NamedTuple):
    """Some rows of a tensor, and the rank that has them."""

    rank: int
    start: int
    stop: int


def is_in_rows(tensor: Tensor) -> bool:
    """Return whether a tensor is cut into rows along one axis of a mesh, and copied along all others."""
    if not isinstance(tensor, DTensor):
        return False
    cuts = [placement for placement in tensor.placements if not placement.is_replicate()]
    return len(cuts) <= 1 and all(cut.is_shard(0) for cut in cuts)


def pieces_of(tensor: Tensor) -> tuple[Piece, ...]:
    """Return who has the rows of a tensor, in their order; nothing for one that this rank has whole."""
    axis = _axis(tensor)
    if axis is None:
        return ()
    assert isinstance(tensor, DTensor)
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert here is not None, "only ranks of a mesh hold its tensors"
    place = [slice(None) if i == axis else at for i, at in enumerate(here)]
    ranks: list[int] = mesh.mesh[tuple(place)].tolist()
    size = -(-tensor.shape[0] // len(ranks))  # torch.chunk's; the last ones may have fewer, or none
    bounds = [min(i * size, tensor.shape[0]) for i in range(len(ranks) + 1)]
    return tuple(Piece(*piece) for piece in zip(ranks, bounds, bounds[1:]))


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this rank has of another, which is cut."""
    axis = _axis(like)
    if axis is None:
        return whole
    assert isinstance(like, DTensor)
    here = like.device_mesh.get_coordinate()
    assert here is not None
    piece = pieces_of(like)[here[axis]]
    return whole[piece.start : piece.stop]


def cut_as(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor cut as another one is, of which this rank keeps its rows."""
    if not isinstance(like, DTensor):
        return whole
    own = own_rows(whole, like).to(like.device, copy=True)
    return DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _axis(tensor: Tensor) -> int | None:
    """Return the axis of the mesh that rows are spread over."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [i for i, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    return axes[0] if axes else None
