"""Start one command under the supervisor and stop it without a trace. Knows processes, logs and pipes, not servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_bench.backends import supervisor
from ddtree_bench.backends.leases import end_marked
from ddtree_bench.errors import ServerError

GRACE_S = 15.0  # longer than a server takes to stop its ranks in good order


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How the server's first process ended; `status` as in subprocess: negative is a signal."""

    status: int
    reason: str = ""


class Launched:
    """A command that runs under a supervisor. `stop` may be called twice; `poll` never blocks."""

    def __init__(
        self, command: Sequence[str], *, log_path: Path, lease_dir: Path, env: Mapping[str, str], grace_s: float
    ) -> None:
        self.command = tuple(command)
        self.log_path = log_path
        self.pid: int | None = None
        self.pgid: int | None = None
        self.supervisor_pid: int | None = None
        self.exit: Exit | None = None
        self.was_killed = False
        self._grace_s = grace_s
        self._token = uuid.uuid4().hex
        self._lease = lease_dir / f"{self._token}.lease"
        self._is_stopped = False
        self._buffer = b""
        read_end, self._control = os.pipe()
        try:
            self._start(read_end, lease_dir, env)
        except BaseException:  # the supervisor, if it runs, sees the end of the pipe and clears up
            os.close(self._control)
            self._is_stopped = True
            raise
        finally:
            os.close(read_end)

    def _start(self, read_end: int, lease_dir: Path, env: Mapping[str, str]) -> None:
        lease_dir.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.unlink(missing_ok=True)  # the URL is read from it: an earlier launch's must not be
        options = ["--control-fd", str(read_end), "--lease", str(self._lease), "--log", str(self.log_path)]
        options += ["--token", self._token, "--driver-pid", str(os.getpid()), "--grace-s", str(self._grace_s)]
        self._status_read, status_write = os.pipe()
        try:
            shim = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, *options, "--", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=status_write,
                stderr=subprocess.DEVNULL,
                pass_fds=(read_end,),
                env={**os.environ, **env},
                start_new_session=True,
            )
        finally:
            os.close(status_write)
        os.set_blocking(self._status_read, False)
        shim.wait()  # its first process ends at once: the supervisor proper is its child
        deadline = time.monotonic() + 30
        while self.pid is None and self.exit is None:
            self.poll()
            if time.monotonic() > deadline:
                raise ServerError("the supervisor must start within 30 s; it did not", kind="supervisor")
            time.sleep(0.005)

    def poll(self) -> Exit | None:
        """Return how the server ended, or None while it runs."""
        for event in self._events():
            if event["event"] == "started":
                self.pid, self.pgid, self.supervisor_pid = event["pid"], event["pgid"], event["supervisor_pid"]
            elif event["event"] == "exited":
                self.exit = Exit(status=event["status"], reason=event.get("reason", ""))
            elif event["event"] == "stopped":
                self.was_killed = event["was_killed"]
            elif event["event"] == "closed" and self.exit is None and not self._is_stopped:
                self.exit = Exit(status=-9, reason="the supervisor was killed")
        return self.exit

    def _events(self) -> list[dict[str, Any]]:
        events = []
        while True:
            try:
                data = os.read(self._status_read, 65536)
            except BlockingIOError:
                break
            except OSError:  # closed by stop
                break
            if not data:
                events.append({"event": "closed"})
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines] + events

    def stop(self) -> None:
        """End the whole group and wait until it is empty; also when the supervisor itself was killed."""
        if self._is_stopped:
            return
        self._is_stopped = True
        os.close(self._control)
        deadline = time.monotonic() + 2 * self._grace_s + 20
        while self._lease.exists() and self._is_supervised() and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.02)
        self.poll()
        if self._lease.exists():  # the supervisor is dead or stuck: do its work here
            end_marked(self._token, grace_s=self._grace_s)
            self._lease.unlink(missing_ok=True)
        os.close(self._status_read)

    def _is_supervised(self) -> bool:
        return self.supervisor_pid is not None and supervisor.start_time(self.supervisor_pid) is not None

    def is_empty(self) -> bool:
        """Return whether no process of the server's group is left."""
        return self.pgid is None or not group_members(self.pgid)


def group_members(pgid: int) -> list[int]:
    """Return the live processes of a group; one that has ended and only waits to be reaped does not count."""
    members = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pgid and fields[0] != "Z":
            members.append(int(file.parent.name))
    return members


class LogReader:
    """Reads a growing log once: whole new lines at each call, and the last lines for an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""

    def new_lines(self) -> list[str]:
        """Return the whole lines that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data.decode("utf-8", errors="replace")).split("\n")
        return [line.rstrip("\r") for line in lines]


def log_tail(path: Path | None, num_lines: int = 20) -> list[str]:
    """Return the last lines of a log; empty where there is none."""
    if path is None or not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        return file.read().decode("utf-8", errors="replace").splitlines()[-num_lines:]
