"""One writer of a results folder: an advisory lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ddtree_bench.errors import DdtreeError


@contextlib.contextmanager
def results_lock(results_dir: Path) -> Iterator[None]:
    """Hold a results folder for one sweep or comparison.

    Raises:
        DdtreeError: another process holds it; names that process.
    """
    results_dir.mkdir(parents=True, exist_ok=True)
    path = results_dir / ".lock"
    with path.open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise DdtreeError(
                f"{results_dir} must be written by one command at a time; process {file.read().strip() or '?'} is writing it; "
                "wait for it, stop it, or give another --results"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
