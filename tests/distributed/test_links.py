"""Links between ranks, and grids: what is refused, without or with few ranks."""

import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samo
from samo.checkpoint import gathering
from samo.checkpoint.merging import Origin
from samo.distributed import links as links_module
from samo.distributed.links import Links
from samo.errors import CheckpointError, PeerError
from tests.ranks import run_ranks

# Links


def talk(rank: int, num_ranks: int) -> None:
    links = Links([1, 0], timeout_s=2)
    assert links.is_leader == (rank == 1)
    other = 1 - rank
    if rank == 0:
        links.send_json(other, {"ä": [1, None]})
        links.send_bytes(other, torch.arange(5, dtype=torch.uint8))
        links.send_bytes(other, torch.empty(0, dtype=torch.uint8))
        for words in ([-3], [3]):
            dist.send(torch.tensor(words), other, tag=links_module._TAG)
        dist.send(torch.frombuffer(bytearray(b"{]}"), dtype=torch.uint8), other, tag=0x5A30)
    else:
        assert links.recv_json(other, "a word") == {"ä": [1, None]}
        room = torch.zeros(5, dtype=torch.uint8)
        links.recv_bytes(other, room, "a tensor")
        links.recv_bytes(other, room[:0], "nothing")
        assert room.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(PeerError, match="rank 0 sent a message of -3 bytes in place of a word"):
            links.recv_json(other, "a word")
        with pytest.raises(PeerError, match="rank 0 sent no JSON in place of a word"):
            links.recv_json(other, "a word")
        with pytest.raises(PeerError, match=r"silent for 2 s, while rank 1 waited for it") as late:
            links.recv_json(other, "it")
        assert late.value.ranks == (0,)
    if rank == 0:
        time.sleep(60)


def test_ranks_talk_and_nonsense_and_silence_have_a_name() -> None:
    run_ranks(2, talk, lost=[0])


# What ranks say


class Script:
    """Links whose other end says what is written, and that keep what was sent."""

    rank = 0
    ranks = (0, 1)
    others = (1,)
    is_leader = True

    def __init__(self, *said: dict[str, Any]) -> None:
        self._said = list(said)
        self.sent: list[Any] = []

    def recv_json(self, rank: int, what: str) -> Any:
        return json.loads(json.dumps(self._said.pop(0)))

    def send_json(self, rank: int, content: Any) -> None:
        self.sent.append(content)


def test_a_tensor_of_another_size_is_refused() -> None:
    origin = Origin(1, "F32", (4,))
    source = gathering.fetched(Script({"bytes": 12}), "weights", "a", origin, {})  # type: ignore[arg-type]
    message = r"rank 1 has 12 bytes of 'a' \(weights\) and said it had 16; did another thread"
    with pytest.raises(CheckpointError, match=message):
        source.make()


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (PeerError("rank 9 is gone", (9,)), PeerError, "rank 9 is gone"),
        (CheckpointError("no room"), CheckpointError, "^no room"),
        (KeyError("x"), CheckpointError, "rank 1 failed: KeyError: 'x'"),
        (KeyboardInterrupt(), CheckpointError, "rank 1 failed: KeyboardInterrupt: Keyb"),
    ],
)
def test_a_failure_is_told_and_raised(
    failure: BaseException, kind: type[Exception], message: str
) -> None:
    links: Any = Script({"share": None, "failure": gathering._told(failure)})
    with pytest.raises(kind, match=message):
        gathering.agree(links, None, "it")
    assert links.sent[0]["end"]["kind"] == kind.__name__
    with pytest.raises(type(failure)):
        gathering.agree(None, failure, "it")


def test_a_failure_of_our_own_comes_first() -> None:
    links: Any = Script({"share": None, "failure": gathering._told(KeyError("theirs"))})
    with pytest.raises(ValueError, match="ours"):
        gathering.agree(links, ValueError("ours"), "it")


# Grids


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 8))
    return samo.compress_(made, samo.prune(made, 0.5))


def test_settings_out_of_range_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_s must be over 0, got 0"):
        samo.save(tmp_path, model(), timeout_s=0)
    with pytest.raises(TypeError, match=r"mesh must be a DeviceMesh, got int; build one with samo"):
        samo.load(tmp_path, model(), mesh=4)  # type: ignore[arg-type]


def meet(rank: int, num_ranks: int, path: Any) -> None:
    mesh = dist.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("data",))
    if rank == 1:
        wrong = dist.device_mesh.DeviceMesh("cpu", [0, 2], mesh_dim_names=("data",))
        with pytest.raises(CheckpointError, match=r"rank 1 is not in the mesh, which has ranks"):
            samo.save(path, model(), mesh=wrong)
        return
    dist.device_mesh.DeviceMesh("cpu", [0, 2], mesh_dim_names=("data",))
    if rank == 0:
        samo.save(path, model(), mesh=mesh)  # one rank is one process


def test_only_ranks_of_the_mesh_save(tmp_path: Any) -> None:
    run_ranks(3, meet, tmp_path / "last")
    samo.load(tmp_path / "last", nn.Sequential(nn.Linear(8, 8)))


def test_a_pipeline_of_one_stage_is_a_model(tmp_path: Any) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    pipeline = samo.Pipeline(layers, nn.functional.mse_loss, None, 1)
    assert list(pipeline.names) == list(layers.state_dict())
    samo.save(tmp_path, pipeline)
    again = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    samo.load(tmp_path, again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), layers.parameters()))
