"""The supervisor and leases: whoever is killed, and however, no process of a launch is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_bench.backends.launch import Launched, group_members
from ddtree_bench.backends.leases import marked, sweep_leases
from ddtree_bench.backends.supervisor import start_time

# a leader and one rank that print their pids; argv[1:] say what they do
FAMILY = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal,sys,time\\n"
if "deaf_rank" in sys.argv: code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
code += "print('rank ready', flush=True); time.sleep(60)"
rank = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session="escape" in sys.argv)
print("rank", rank.pid, flush=True)
if "exit" in sys.argv: sys.exit(3)
time.sleep(60)
"""


def launch(tmp_path: Path, *words: str, grace_s: float = 0.3) -> Launched:
    command = [sys.executable, "-S", "-c", FAMILY, *words]
    launched = Launched(command, log_path=tmp_path / "log", lease_dir=tmp_path / "leases", env={}, grace_s=grace_s)
    wait_for(lambda: "rank ready" in (tmp_path / "log").read_text())
    return launched


def wait_for(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition must hold in time"
        time.sleep(0.02)


def rank_of(tmp_path: Path) -> int:
    lines = (tmp_path / "log").read_text().split("\n")
    return int(next(line for line in lines if line.startswith("rank ") and line != "rank ready").split()[1])


def is_gone(pid: int | None) -> bool:
    return pid is None or start_time(pid) is None


def test_stop_leaves_nothing(tmp_path):
    launched = launch(tmp_path)
    rank = rank_of(tmp_path)
    assert launched.pgid != os.getpgid(0)
    assert set(group_members(launched.pgid)) == {launched.pid, rank}
    launched.stop()
    launched.stop()
    assert launched.is_empty()
    assert is_gone(rank)
    assert not launched.was_killed
    assert list((tmp_path / "leases").iterdir()) == []


def test_exit_is_seen_and_the_rank_is_cleared(tmp_path):
    launched = launch(tmp_path, "exit")
    wait_for(lambda: launched.poll() is not None)
    assert launched.exit.status == 3
    launched.stop()
    assert launched.is_empty()
    assert is_gone(rank_of(tmp_path))


def test_command_that_does_not_exist_is_an_exit(tmp_path):
    launched = Launched(["/no/such/command"], log_path=tmp_path / "log", lease_dir=tmp_path, env={}, grace_s=1)
    assert launched.poll().status == 127
    launched.stop()
    assert launched.is_empty()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("deaf",), ("deaf_rank",), ("deaf", "deaf_rank"), ("escape", "deaf_rank")], ids="-".join)
def test_stop_kills_what_ignores_sigterm_or_left_the_group(tmp_path, words):
    launched = launch(tmp_path, *words)
    rank = rank_of(tmp_path)
    launched.stop()
    assert launched.is_empty()
    assert is_gone(rank)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("deaf", "deaf_rank"), ("escape", "deaf_rank")], ids=["polite", "deaf", "escape"])
def test_supervisor_killed_then_stop(tmp_path, words):
    launched = launch(tmp_path, *words)
    rank = rank_of(tmp_path)
    os.kill(launched.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: launched.poll() is not None)
    launched.stop()
    assert launched.is_empty()
    assert is_gone(rank)
    assert list((tmp_path / "leases").iterdir()) == []


DRIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_supervisor import launch
launched = launch(Path(sys.argv[1]), *sys.argv[2:])
print(launched.pgid, launched.supervisor_pid, flush=True)
time.sleep(60)
"""


def start_driver(tmp_path: Path, *words: str) -> tuple[subprocess.Popen, int, int]:
    code = DRIVER.format(here=str(Path(__file__).parent))
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *words], stdout=subprocess.PIPE, text=True)
    pgid, supervisor_pid = (int(word) for word in driver.stdout.readline().split())
    return driver, pgid, supervisor_pid


@pytest.mark.slow
def test_driver_killed_with_sigkill_leaves_nothing(tmp_path):
    driver, pgid, _ = start_driver(tmp_path, "deaf", "deaf_rank")
    rank = rank_of(tmp_path)
    driver.kill()
    driver.wait()
    wait_for(lambda: not group_members(pgid) and is_gone(rank))
    wait_for(lambda: list((tmp_path / "leases").iterdir()) == [])


@pytest.mark.slow
def test_driver_and_supervisor_killed_is_cleared_by_the_next_start(tmp_path):
    driver, pgid, supervisor_pid = start_driver(tmp_path, "deaf", "deaf_rank")
    rank = rank_of(tmp_path)
    assert sweep_leases(tmp_path / "leases", grace_s=0.2) == [], "a live driver's server is left alone"
    os.kill(supervisor_pid, signal.SIGKILL)
    driver.kill()
    driver.wait()
    assert not is_gone(rank), "without both, the ranks that ignore SIGTERM live on"
    cleared = sweep_leases(tmp_path / "leases", grace_s=0.2)
    assert len(cleared) == 1
    assert is_gone(rank)
    assert not group_members(pgid)
    assert list((tmp_path / "leases").iterdir()) == []


def test_lease_with_a_recycled_pid_touches_no_stranger(tmp_path):
    stranger = subprocess.Popen(["sleep", "30"])
    try:
        lease = {"token": "0" * 32, "driver_pid": 1, "driver_start": -1, "supervisor_pid": 1, "supervisor_start": -1}
        lease |= {"pgid": stranger.pid, "leader_start": 1, "command": ["x"]}
        lease["boot_id"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        (tmp_path / "a.lease").write_text(json.dumps(lease))
        assert len(sweep_leases(tmp_path, grace_s=0.1)) == 1
        assert marked("0" * 32) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
