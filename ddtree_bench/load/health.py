"""Watches the client itself while it measures: lag of its event loop and its share of one core."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ddtree_bench.metrics.latency import distribution

_BEAT_S = 0.02


class ClientHealth:
    """A heartbeat task and a processor clock around one load; an async context manager."""

    def __init__(self) -> None:
        self._lags_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._wall_s = self._cpu_s = 0.0

    async def __aenter__(self) -> ClientHealth:
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wall_s = time.monotonic() - self._wall_s
        self._cpu_s = time.process_time() - self._cpu_s
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            self._lags_ms.append((time.monotonic() - before_s - _BEAT_S) * 1000.0)

    def report(self) -> dict[str, Any]:
        """Return {loop_lag: {p50_ms, p99_ms}, cpu_share: processor time / wall time of this process}."""
        lag = distribution(self._lags_ms)
        return {
            "loop_lag": {"p50_ms": lag["p50"], "p99_ms": lag["p99"]},
            "cpu_share": self._cpu_s / self._wall_s if self._wall_s > 0 else None,
        }
