"""kill -9 of the sweep, its supervisor, the server's parent or a rank, at random moments: nothing is lost, nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import optuna
import pytest

from ddtree_bench.backends.launch import group_members
from ddtree_bench.backends.leases import marked
from ddtree_bench.config import SweepSpec
from ddtree_bench.records import read_trials
from ddtree_bench.sweep.journal import open_storage
from ddtree_bench.sweep.toml import to_toml

sys.path.insert(0, str(Path(__file__).parents[1] / "sweep"))
import mock_backend

NUM_KILLS = 20
TARGETS = ("driver", "driver", "supervisor", "leader", "rank")


@dataclass(frozen=True)
class Kind:
    """Which servers the sweep launches: how many trials, seconds between kills, and the sweep's program and spec."""

    name: str
    num_trials: int
    gaps_s: tuple[float, float]

    @property
    def study_name(self) -> str:
        return "mock" if self.name == "mock" else "kills"

    def spec(self) -> SweepSpec:
        # a small machine under load may be slow to start a server, and no kill here may be taken for that
        if self.name == "mock":
            return mock_backend.make_spec(study={"trials": self.num_trials}, server={"ready_timeout_s": 120.0})
        return mock_backend.make_spec(
            study={"name": "kills", "trials": self.num_trials},
            server={"tensor_parallel": 2, "ready_timeout_s": 120.0},
            load={"num_prompts": 3, "max_tokens": 24},
            gates={"drift": "none"},
        )

    def options(self) -> list[str]:
        return ["--ms-per-round", "40"] if self.name == "mock" else [mock_backend.REAL]


MOCK = Kind("mock", num_trials=10, gaps_s=(0.1, 2.5))
REAL = Kind("real", num_trials=5, gaps_s=(0.5, 9.0))


class Victim:
    """A sweep in a process of its own, and the processes below it as its leases tell them."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.kind = kind
        self.results, self.leases, self.file = folder / "results", folder / "leases", folder / "sweep.toml"
        self.file.write_text(to_toml(kind.spec().to_dict()))
        self.tokens: set[str] = set()
        self.log = (folder / "sweep.log").open("ab")
        self.driver = self.start()

    def start(self) -> subprocess.Popen:
        command = [sys.executable, mock_backend.__file__, str(self.file), str(self.results), str(self.leases)]
        return subprocess.Popen([*command, *self.kind.options()], stderr=self.log)

    def leased(self) -> list[dict]:
        found = []
        for file in self.leases.glob("*.lease") if self.leases.exists() else ():
            try:
                found.append(json.loads(file.read_text()))
            except (OSError, json.JSONDecodeError):
                continue
        self.tokens |= {lease["token"] for lease in found}
        return found

    def pick(self, target: str) -> list[int]:
        """Return the processes of a kind that run now."""
        if target == "driver":
            return [self.driver.pid]
        lease = next((lease for lease in self.leased() if lease["pgid"] is not None), None)
        if lease is None:
            return []
        if target == "supervisor":
            return [lease["supervisor_pid"]]
        members = group_members(lease["pgid"])
        return [pid for pid in members if (pid == lease["pgid"]) == (target == "leader")]

    def completed(self) -> dict[int, bytes]:
        """Return the bytes of every settled trial; one that awaits another attempt may be moved and is none."""
        kept = {}
        for file in self.results.glob("trial-*/trial.json"):
            try:
                data = file.read_bytes()
            except FileNotFoundError:
                continue
            if json.loads(data)["state"] == "complete":
                kept[int(file.parent.name.partition("-")[2])] = data
        return kept

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 30
        while any(marked(token) for token in self.tokens):
            assert time.monotonic() < deadline, "no process of an ended sweep may live on"
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [MOCK, REAL], ids=["mock-servers", "real-servers-on-two-ranks"])
def test_twenty_kills_lose_nothing_and_leave_nothing(tmp_path, kind):
    rng = random.Random(7)
    victim = Victim(tmp_path, kind)
    hits = dict.fromkeys(TARGETS, 0)
    deadline = time.monotonic() + 420
    while sum(hits.values()) < NUM_KILLS and time.monotonic() < deadline:
        time.sleep(rng.uniform(*kind.gaps_s))
        before, target = victim.completed(), rng.choice(TARGETS)
        pids = victim.pick(target)
        if victim.driver.poll() is not None and len(read_trials(victim.results)) >= kind.num_trials:
            break
        if victim.driver.poll() not in (None, 0):  # three kills of the plain arm in one run end it; the same command goes on
            victim.driver = victim.start()
            continue
        if pids:
            os.kill(rng.choice(pids), signal.SIGKILL)
            hits[target] += 1
        if target == "driver":
            victim.driver.wait()
            victim.assert_nothing_is_left()
            after = victim.completed()
            assert before.items() <= after.items(), "a completed trial must be kept as it was"
            victim.driver = victim.start()
    if victim.driver.wait(timeout=300) != 0:
        victim.driver = victim.start()
    assert victim.driver.wait(timeout=300) == 0, (tmp_path / "sweep.log").read_text()
    victim.assert_nothing_is_left()
    assert list(victim.leases.iterdir()) == []
    trials = read_trials(victim.results)
    assert [trial.number for trial in trials] == list(range(kind.num_trials))
    assert len({json.dumps(dict(trial.asked), sort_keys=True) for trial in trials}) == kind.num_trials
    study = optuna.load_study(study_name=kind.study_name, storage=open_storage(victim.results, None))
    unfinished = [t.number for t in study.get_trials() if not t.state.is_finished()]
    assert unfinished == []
    told = sorted(t.user_attrs["trial"] for t in study.get_trials(states=[optuna.trial.TrialState.COMPLETE]))
    assert told == [trial.number for trial in trials if trial.failure is None or trial.failure.is_own_fault]
    print(f"kills: {hits}")
    assert sum(hits.values()) >= 5, f"the test must have hit something; given {hits}"
