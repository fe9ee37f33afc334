"""SIGINT and SIGTERM as one exception, so that a server is stopped and a trial is closed whichever comes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM was received; a KeyboardInterrupt, so that nothing on the way takes it for a failed request."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_status(self) -> int:
        """The status that a shell expects: 128 + the signal's number."""
        return 128 + self.number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted on SIGINT and SIGTERM inside the block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
