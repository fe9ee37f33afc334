"""The main program of ranks 1 … W − 1: do what rank 0's commands say, step by step."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddtree_bench.engine.engine import Engine
from ddtree_bench.engine.ranks import RankStart, StepCommand, connect_store, end_with_parent, join_group, receive_message
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.models.parallel import Parallel

MakeEngine = Callable[[EngineSettings, Parallel], Engine]


def worker_main(make_engine: MakeEngine = Engine) -> None:
    """Run one rank until rank 0 says stop or is gone."""
    start = receive_message(sys.stdin.buffer)
    if not isinstance(start, RankStart):
        sys.exit("a rank is started by its rank 0, which tells it who it is; use ddtree-bench serve --tensor-parallel N")
    end_with_parent(start.parent_pid)
    commands = _read_in_background()
    torch.set_num_threads(start.settings.threads_per_rank)
    parallel = join_group(start.settings, start.rank, connect_store(start))
    engine = make_engine(start.settings, parallel)
    while not (command := commands.get()).stop:
        apply_command(engine, command)
        engine.step()
    dist.destroy_process_group()


def apply_command(engine: Engine, command: StepCommand) -> None:
    """Hand a command's requests and aborts to this rank's engine, in the order that every rank uses."""
    for request in command.submitted:
        engine.submit(request)
    for request_id in command.aborted:
        engine.abort(request_id)


def _read_in_background() -> queue.SimpleQueue[StepCommand]:
    """Read commands on a thread of their own, so that the end of rank 0 is seen even from inside a collective."""
    commands: queue.SimpleQueue[StepCommand] = queue.SimpleQueue()

    def read() -> None:
        while True:
            command: Any = receive_message(sys.stdin.buffer)
            if command is None:
                os._exit(1)
            commands.put(command)
            if command.stop:
                return

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


def leave_signals_to_rank_0() -> None:
    """Ctrl-C and a stop of the whole process group reach every rank; rank 0 finishes first and then ends the others."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    leave_signals_to_rank_0()
    worker_main()
