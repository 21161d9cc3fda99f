"""The mesh without other ranks: sizes, devices, and what it reads of the environment."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import samo
from samo.distributed.mesh import check_sizes, join, mesh
from samo.errors import ConfigError


@given(st.integers(1, 6), st.integers(1, 6))
def test_the_missing_size_is_found(pipe: int, data: int) -> None:
    ranks = pipe * data
    assert check_sizes(pipe, None, ranks) == check_sizes(pipe, data, ranks) == (pipe, data)


def test_sizes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    fitting = "these do: pipe=1 x data=4, pipe=2 x data=2, pipe=4 x data=1"
    for data, asked in ((2, "pipe=3 x data=2"), (None, "pipe=3")):
        with pytest.raises(ValueError, match=f"{asked} does not make up 4 ranks; {fitting}"):
            check_sizes(3, data, 4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pipe": 2}, "pipe=2 does not make up 1 rank; these do"),
        ({"data": 0}, "data must be 1 or more, got 0"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"timeout_s": 0}, "timeout_s must be over 0, got 0"),
    ],
)
def test_settings_are_refused_before_anything_is_initialized(settings: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        samo.mesh(**settings)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("num_gpus", "chosen"),
    [
        (1, [0, "gloo"] * 3),
        (2, [0, "gloo", 1, "gloo", 0, "gloo"]),
        (3, [0, "nccl", 1, "nccl", 2, "nccl"]),
    ],
)
def test_ranks_share_gpus_without_nccl_and_warn_once(
    num_gpus: int, chosen: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: found.append(backend))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for local_rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        join("cuda", timedelta(seconds=1), None)
    assert found == chosen
    assert len(caplog.messages) == (num_gpus < 3)


def test_an_environment_that_no_launcher_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="lacks RANK, MASTER_ADDR, MASTER_PORT; start ranks with"):
        mesh(device="cpu")
