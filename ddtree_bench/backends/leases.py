"""Leases of running servers: what a start clears when an earlier driver and its supervisor were both killed.

A lease is a small file in a folder of this user on this machine. A process is touched only if its environment carries the
lease's own random token, so a recycled process id can never hit a stranger.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.backends.supervisor import TOKEN_VARIABLE, boot_id, start_time


def default_lease_dir() -> Path:
    """Return this user's folder of leases, made with access for this user alone."""
    folder = Path(tempfile.gettempdir()) / f"ddtree-bench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} must belong to this user; given owner {folder.stat().st_uid}; remove it")
    return folder


def sweep_leases(lease_dir: Path, *, grace_s: float = 10.0) -> list[str]:
    """End servers whose driver is gone, and return one line for each lease that was cleared.

    A lease whose supervisor lives is left to it: it is given `grace_s` to finish first.
    """
    cleared = []
    for file in sorted(lease_dir.glob("*.lease")):
        try:
            lease = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        if lease.get("boot_id") == boot_id():
            if _is_alive(lease, "driver"):
                continue
            deadline = time.monotonic() + grace_s
            while _is_alive(lease, "supervisor") and time.monotonic() < deadline:
                time.sleep(0.1)
            num_ended = end_marked(lease["token"], grace_s=grace_s)
            cleared.append(f"cleared {num_ended} processes left by an earlier run: {' '.join(lease['command'][:6])}")
        file.unlink(missing_ok=True)
    return cleared


def _is_alive(lease: Mapping[str, Any], who: str) -> bool:
    start = lease.get(f"{who}_start")
    return start is not None and start_time(lease[f"{who}_pid"]) == start


def end_marked(token: str, *, grace_s: float) -> int:
    """SIGTERM, then SIGKILL, every process whose environment carries the token; return how many there were."""
    first = marked(token)
    deadline = time.monotonic() + grace_s
    while pids := marked(token):
        number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    return len(first)


def marked(token: str) -> list[int]:
    """Return the live processes whose environment carries the token."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
