"""The product's mock server inside a test: in a thread of its own, or as a process like a real server's."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddtree_bench.load import mock


@dataclass
class Running:
    """A mock that serves: its URL and the server object with its counters."""

    url: str
    server: mock.MockServer


@contextlib.contextmanager
def running_mock(**knobs: Any) -> Iterator[Running]:
    """Serve a `MockSpec(**knobs)` from a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    knobs = {"ms_per_round": 1.0, "first_token_ms": 1.0} | knobs
    server = mock.MockServer(mock.MockSpec(**knobs))
    runner, url = asyncio.run_coroutine_threadsafe(mock.start(server), loop).result(20)
    try:
        yield Running(url, server)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


@contextlib.contextmanager
def mock_process(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `ddtree-bench mock` as a process; yields (URL, process), the URL empty where it ended without one."""
    command = [sys.executable, "-m", "ddtree_bench", "mock", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate(timeout=20)
