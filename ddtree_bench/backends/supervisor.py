"""The small process between a driver and a server, so that no way of dying leaves a server behind.

Run as a file (`python -I supervisor.py OPTIONS -- COMMAND…`), standard library only. It forks twice, so it belongs to no
process that may be killed with its children; starts the server as the leader of its own session and group; and reads a
pipe whose other end only the driver holds. When that end closes, because the driver asked for a stop or was killed, the
group gets SIGTERM, then SIGKILL after a grace time, until it is empty. As a subreaper it also inherits, and ends, ranks
that left the group. A lease file tells a later start what to clear should this process be killed as well.

Events for the driver are JSON lines on standard output: started, exited, stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

TOKEN_VARIABLE = "DDTREE_BENCH_LEASE"  # marks every descendant of one launch; read back only to recognise our own
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.05


def main() -> None:
    """Detach, start the server, wait for the end of the pipe or of the server, and clear up."""
    options = _options()
    if os.fork() > 0:
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    status = _supervise(options)
    sys.stdout.flush()
    os._exit(status)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--lease", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--driver-pid", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def _supervise(options: argparse.Namespace) -> int:
    write_lease(options.lease, token=options.token, driver_pid=options.driver_pid, pgid=None, command=options.command)
    try:
        server = _spawn(options)
    except OSError as error:
        options.lease.unlink(missing_ok=True)
        _tell(event="exited", status=127, reason=str(error))
        return 1
    write_lease(options.lease, token=options.token, driver_pid=options.driver_pid, pgid=server.pid, command=options.command)
    _tell(event="started", pid=server.pid, pgid=server.pid, supervisor_pid=os.getpid())
    status: int | None = None
    while not select.select([options.control_fd], [], [], POLL_S)[0]:
        status = _reap(server.pid, status)
        if status is not None:
            _tell(event="exited", status=status)
            select.select([options.control_fd], [], [])  # the driver reads the log, then lets go
            break
    was_killed = clear_group(server.pid, grace_s=options.grace_s, reap=lambda: _reap(server.pid, None))
    _end_adopted(options.grace_s)
    options.lease.unlink(missing_ok=True)
    _tell(event="stopped", was_killed=was_killed)
    return 0


def _spawn(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    me = os.getpid()

    def before_exec() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != me:
            os._exit(1)

    with options.log.open("ab") as log:
        return subprocess.Popen(
            options.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, TOKEN_VARIABLE: options.token},
            start_new_session=True,
            preexec_fn=before_exec,
        )


def _reap(leader: int, known: int | None) -> int | None:
    """Reap whatever has ended; return the leader's status in Popen's form once it is known."""
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return known
        if pid == 0:
            return known
        if pid == leader:
            known = os.waitstatus_to_exitcode(raw)


def clear_group(pgid: int, *, grace_s: float, reap=lambda: None) -> bool:
    """SIGTERM a process group, wait, SIGKILL what is left, and poll until it is empty; True if a kill was needed."""
    if not _signal_group(pgid, signal.SIGTERM):
        return False
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        reap()
        if not _signal_group(pgid, 0):
            return False
        time.sleep(POLL_S)
    while _signal_group(pgid, signal.SIGKILL):  # SIGKILL cannot be ignored; a process in the kernel may take its time
        reap()
        time.sleep(POLL_S)
    return True


def _signal_group(pgid: int, number: int) -> bool:
    """Send to the group; False once it has no process."""
    try:
        os.killpg(pgid, number)
    except ProcessLookupError:
        return False
    return True


def _end_adopted(grace_s: float) -> None:
    """End the descendants that left the group: as subreaper this process is their parent once theirs is gone."""
    deadline = time.monotonic() + grace_s
    while children := _children():
        number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(POLL_S)
        _reap(0, None)


def _children() -> list[int]:
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def write_lease(path: Path, *, token: str, driver_pid: int, pgid: int | None, command: list[str]) -> None:
    """Write who runs what, for the sweep of leases by a later start; whole or not at all."""
    lease = {
        "token": token,
        "driver_pid": driver_pid,
        "driver_start": start_time(driver_pid),
        "supervisor_pid": os.getpid(),
        "supervisor_start": start_time(os.getpid()),
        "pgid": pgid,
        "leader_start": None if pgid is None else start_time(pgid),
        "boot_id": boot_id(),
        "command": command,
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(lease), encoding="utf-8")
    scratch.replace(path)


def start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot, which with the pid names it for good; None once it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def boot_id() -> str:
    """Return the kernel's id of this boot: pids and start times mean nothing across a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _tell(**event: object) -> None:
    with contextlib.suppress(OSError):  # the driver may be dead, which is why this process exists
        os.write(1, (json.dumps(event) + "\n").encode())


if __name__ == "__main__":
    main()
