"""``samo launch``: several ranks of this machine with one command, on torchrun's launcher."""

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samo.cli.commands import Finetune, Launch, Train
from samo.cli.main import parse
from samo.train.launch_env import RESTARTS, RUN_ID_PREFIX
from samo.train.rank_group import rank_name
from samo.train.resolve import resolve

_BACKEND: Final = "samo-local"


def run(command: Launch) -> int:
    """Start the ranks, wait for them, and return the exit code of the first that failed."""
    train = parse(command.command)  # reports wrong flags before any rank starts
    assert isinstance(train, Train | Finetune)
    if train.resume is None:
        resolve(train)
    with tempfile.TemporaryDirectory(prefix="samo-launch-") as temporary:
        return _launch(command, train, str(command.logs or temporary))


def _launch(command: Launch, train: Train | Finetune, logs: str) -> int:
    threads = max((os.cpu_count() or 1) // command.num_ranks, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:  # connections of this run never leave the machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    # For ranks to save after Ctrl-C, in seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    logging.disable(logging.ERROR)  # torch's launcher logs in many lines what is printed below
    rendezvous_handler_registry.register(_BACKEND, _LocalRendezvous)
    others = range(1, command.num_ranks)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=command.num_ranks,
        run_id=f"{RUN_ID_PREFIX}{os.getpid()}",
        rdzv_backend=_BACKEND,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        max_restarts=0,  # each restart is a launch of its own, so that this names the failed rank
        logs_specs=DefaultLogsSpecs(
            log_dir=logs,
            redirects=dict.fromkeys(others, Std.ALL),
            tee=dict.fromkeys(others, Std.ERR),  # their errors appear here too
        ),
        log_line_prefix_template="[${rank}] ",
    )
    for attempt in range(command.max_restarts + 1):
        os.environ[RESTARTS] = str(attempt)
        try:
            elastic_launch(config, sys.executable)("-m", "samo", *command.command)
            return 0
        except SignalException as error:
            return 128 + int(error.sigval)
        except ChildFailedError as error:
            rank, code = _first_failure(error.failures)
        if code == 2 or code > 128:  # wrong usage, or a signal to a rank: rank 0 has reported it
            return code
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        name = rank_name(train.mesh.num_stages, command.num_ranks, rank)
        sys.stderr.write(f"samo: {name} {how}, the first rank to exit\n")
        if attempt < command.max_restarts:
            which = f"restart {attempt + 1} of {command.max_restarts}"
            sys.stderr.write(f"samo: all ranks restart from the last checkpoint ({which})\n")
    return code if code > 0 else 128 - code


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Return the rank that failed first, and its exit code, negative for a signal.

    Within two seconds, a rank that was killed counts before one that exited, perhaps because of the
    other, and before those that torch's agent ends with SIGTERM.
    """
    start = min(failure.timestamp for failure in failures.values())
    codes = {rank: f.exitcode for rank, f in failures.items() if f.timestamp <= start + 2}
    return min(codes.items(), key=lambda f: (f[1] == -signal.SIGTERM, f[1] > 0, f[0]))


class _LocalRendezvous(StaticTCPRendezvous):
    """A rendezvous for one machine. Unlike torch's, its store listens on 127.0.0.1 only."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__("127.0.0.1", 0, 0, 1, parameters.run_id, timeout=60)

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))
