"""Trials on the real server with random weights and two ranks: whole once, then with one of its processes killed in the load."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_bench.backends import http
from ddtree_bench.backends.embedded import EmbeddedBackend
from ddtree_bench.backends.launch import group_members
from ddtree_bench.config import SweepSpec, TreeSetting
from ddtree_bench.sweep.run import run_sweep
from ddtree_bench.trial import TrialJob, run_trial

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

pytestmark = pytest.mark.slow
TREE = TreeSetting(block_size=8, node_budget=7)


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> SweepSpec:
    from server_process import write_checkpoints

    folder = write_checkpoints(tmp_path_factory.mktemp("checkpoints") / "pair")
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"def f{i}(x):\n    return x + {i}\n"} for i in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = {"model": str(folder / "target"), "drafter": str(folder / "drafter"), "load_format": "dummy"}
    server |= {"tensor_parallel": 2, "ready_timeout_s": 240.0, "extra_args": ["--max-total-tokens", "16384", "--threads", "1"]}
    load = {"dataset_name": "jsonl", "dataset_path": str(prompts), "num_prompts": 8, "num_warmups": 1, "max_tokens": 12}
    gates = {"num_gate_prompts": 2, "gate_max_tokens": 12}
    return SweepSpec.from_dict({"server": server, "load": {**load, "max_concurrency": 2}, "space": {}, "gates": gates})


def run(spec, tmp_path, setting, number, on_stage=lambda stage: None):
    job = TrialJob(
        number=number,
        spec=spec,
        setting=setting,
        asked={"mode": setting.mode},
        workdir=tmp_path / f"arm{number}",
        plain_path=tmp_path / "plain.json",
    )
    record = run_trial(job, EmbeddedBackend(lease_dir=tmp_path / "leases"), on_stage=on_stage)
    assert list((tmp_path / "leases").iterdir()) == []
    assert record.stop["is_clean"], record.stop
    return record


def test_tree_trial_on_the_real_server_is_lossless_and_leaves_nothing(spec, tmp_path):
    plain = run(spec, tmp_path, TreeSetting(mode="plain"), -1)
    assert plain.failure is None, plain.failure
    assert json.loads((tmp_path / "plain.json").read_text())["outputs"][0]["tokens"], "log-probabilities must be told"
    tree = run(spec, tmp_path, TREE, 0)
    assert tree.failure is None, tree.failure
    assert {gate.name: gate.passed for gate in tree.gates} == {"setting": True, "losslessness": True}
    assert tree.metrics["num_verify_steps"] > 0
    assert not tree.stop["was_killed"]


@pytest.mark.parametrize("who", ["leader", "rank"])
def test_killed_process_of_the_real_server_is_the_machines_fault(spec, tmp_path, who):
    spec = dataclasses.replace(spec, gates=dataclasses.replace(spec.gates, losslessness=False))

    def kill_in_load(stage):
        if stage == "load 1/8":
            pgid = json.loads(next((tmp_path / "leases").iterdir()).read_text())["pgid"]
            ranks = [pid for pid in group_members(pgid) if pid != pgid]
            os.kill(pgid if who == "leader" else ranks[-1], signal.SIGKILL)

    record = run(spec, tmp_path, TREE, 0, on_stage=kill_in_load)
    assert record.failure is not None
    assert record.failure.kind == "killed", record.failure
    assert not record.failure.is_own_fault


def test_best_sh_of_a_sweep_serves_and_answers(spec, tmp_path):
    space = SweepSpec.from_dict({"space": {"block_size": 8, "node_budget": 7}}).space
    spec = dataclasses.replace(spec, space=space, study=dataclasses.replace(spec.study, trials=1))
    result = run_sweep(spec, tmp_path / "results", backend=EmbeddedBackend(lease_dir=tmp_path), lease_dir=tmp_path)
    assert result.best is not None, result.trials
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "log").open("wb") as log:
        command = [str(tmp_path / "results" / "best.sh"), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "PATH": path})
    try:
        url = server.stdout.readline().strip()
        answer = http.post(f"{url}/v1/completions", {"prompt": "def f", "max_tokens": 4}, timeout_s=60)
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0
