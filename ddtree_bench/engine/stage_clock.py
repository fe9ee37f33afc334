"""Where a step's time goes, as seen by the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

UNATTRIBUTED = "unattributed"


class StageClock:
    """Add up the host's seconds by stage. On a GPU a stage that only queues work looks short, and the next that waits long.

    Args:
        now: seconds of a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}
        self.step_seconds = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a whole step; what no stage of it took is "unattributed", so that `seconds` always adds up to `step_seconds`."""
        start, staged = self._now(), sum(self.seconds.values())
        try:
            yield
        finally:
            total = self._now() - start
            self.step_seconds += total
            self._add(UNATTRIBUTED, total - (sum(self.seconds.values()) - staged))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the body's time under `name`."""
        start = self._now()
        try:
            yield
        finally:
            self._add(name, self._now() - start)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
