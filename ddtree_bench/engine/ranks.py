"""The processes of the other ranks: start them, talk to them, join them into a group, notice when one dies.

Rank 0 writes every step's command down each rank's standard input. A rank that waits therefore sleeps in a read and
takes no CPU, no collective can time out while the server is idle, and the end of rank 0, however sudden, is an end of
file that ends the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist

from ddtree_bench.engine.request import GenerationRequest
from ddtree_bench.engine.settings import EngineSettings, thread_environment
from ddtree_bench.errors import ServerError
from ddtree_bench.models.parallel import Parallel

WORKER_COMMAND = (sys.executable, "-m", "ddtree_bench.engine.worker")
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_HEADER = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
_JOIN_INTERVAL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """The first message to a rank: who it is and whom it joins on this machine."""

    settings: EngineSettings
    rank: int
    store_port: int
    parent_pid: int


@dataclass(frozen=True, kw_only=True)
class StepCommand:
    """Every later message: what came since the last step, then step once; or stop."""

    submitted: tuple[GenerationRequest, ...] = ()
    aborted: tuple[str, ...] = ()
    stop: bool = False


def send_message(stream: IO[bytes], message: Any) -> None:
    """Write one pickled message; the pipe is private to rank 0 and its children."""
    payload = pickle.dumps(message)
    stream.write(_HEADER.pack(len(payload)) + payload)
    stream.flush()


def receive_message(stream: IO[bytes]) -> Any:
    """Return the next message, None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    payload = stream.read(_HEADER.unpack(header)[0])
    return pickle.loads(payload)


class RankProcesses:
    """Ranks 1 … W − 1 as children of the calling thread, which must live as long as they do.

    Args:
        settings: handed to each.
        command: how a rank is started.
    """

    def __init__(self, settings: EngineSettings, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._settings = settings
        self._store: dist.TCPStore | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        if settings.tensor_parallel == 1:
            return
        # The store gets a socket that listens on loopback alone; by itself it would listen on every interface.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        environment = os.environ | thread_environment(settings)
        for rank in range(1, settings.tensor_parallel):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
            self._processes.append(process)
            self._send(process, RankStart(settings=settings, rank=rank, store_port=port, parent_pid=os.getpid()))

    def join(self) -> Parallel:
        """Join the group as rank 0; returns when every rank has.

        Raises:
            ServerError: a rank ended before it joined.
        """
        if self._store is None:
            return Parallel.single()
        # A collective waits for a dead rank until it times out, so wait for signs of life first.
        while not self._store.check([_joining(rank) for rank in range(1, self._settings.tensor_parallel)]):
            dead = self.find_dead()
            if dead is not None:
                raise rank_died(dead)
            time.sleep(_JOIN_INTERVAL_S)
        return join_group(self._settings, 0, self._store)

    def send(self, command: StepCommand) -> None:
        """Give every rank the command of this step.

        Raises:
            OSError: a rank has closed its end.
        """
        for process in self._processes:
            self._send(process, command)

    def find_dead(self) -> str | None:
        """Say which rank has ended and how, None while all live."""
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                return f"rank {rank} (process {process.pid}) {how}"
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait for all ranks to end, then kill those that have not."""
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
        self.kill()

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None and not process.stdin.closed:
                _close_quietly(process.stdin)

    @staticmethod
    def _send(process: subprocess.Popen[bytes], message: Any) -> None:
        assert process.stdin is not None, "ranks are started with a pipe"
        send_message(process.stdin, message)


def _close_quietly(stream: IO[bytes]) -> None:
    """Close a pipe whose reader may be gone; what was still buffered has no reader either."""
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def join_group(settings: EngineSettings, rank: int, store: dist.Store) -> Parallel:
    """Initialise the process group of this process and return its place in it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if settings.device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=settings.tensor_parallel,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return Parallel.from_process_group()


def connect_store(start: RankStart) -> dist.Store:
    """Return a rank's connection to rank 0's store."""
    store = dist.TCPStore("127.0.0.1", start.store_port, is_master=False, timeout=timedelta(seconds=60))
    store.set(_joining(start.rank), "1")
    return store


def rank_died(dead: str) -> ServerError:
    """Return the error for a rank that has ended; `dead` says which and how."""
    return ServerError(
        f"every tensor-parallel rank must live as long as the server; {dead}; see its traceback above and restart",
        kind="rank_died",
    )


def _joining(rank: int) -> str:
    return f"joining/{rank}"


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when rank 0 ends; end now if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)
