"""One trial: gates as pure functions, then whole trials on mock servers, healthy and not."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "sweep"))
from mock_backend import MockBackend, make_spec

from ddtree_bench.config import TreeSetting
from ddtree_bench.load.workloads import workload_of
from ddtree_bench.records import TrialRecord, read_requests
from ddtree_bench.trial import TrialJob, gates, run_trial
from ddtree_bench.trial.plain import PlainOutput, gate_prompts
from ddtree_bench.trial.run import constraints_of

FAST = ("--ms-per-round", "1", "--first-token-ms", "1")
TOP = ({"def": -0.1, "x": -3.0}, {" a": -0.5, " b": -0.75}, {" c": -0.2, " d": -0.7})
PLAIN = PlainOutput(prompt_id="p", text="def a c", tokens=("def", " a", " c"), top=TOP)


def test_bf16_ulp():
    assert gates.bf16_ulp(16.0) == 0.125
    assert gates.bf16_ulp(-31.9) == 0.125
    assert gates.bf16_ulp(1.0) == 2**-7


def test_equal_text_passes():
    result = gates.losslessness([PLAIN], ["def a c"], dtype="float32")
    assert result.passed
    assert result.numbers == {"num_prompts": 1, "num_equal": 1, "num_ties": 0, "tie_share": 0.0}


@pytest.mark.parametrize(
    ("text", "is_tie", "word"),
    [("def b z", True, "numeric tie"), ("def a d", False, "BUG"), ("def q", False, "not even the second-best")],
    ids=["gap-2-ulp", "gap-0.5", "not-the-runner-up"],
)
def test_bf16_divergence_is_a_tie_or_a_bug_by_the_gap_of_the_top_two(text, is_tie, word):
    result = gates.losslessness([PLAIN], [text], dtype="bfloat16")
    assert result.passed is is_tie
    assert word in gates.divergence(PLAIN, text)["why"]
    assert result.numbers["num_ties"] == int(is_tie)


def test_float32_allows_no_tie():
    result = gates.losslessness([PLAIN], ["def b z"], dtype="float32")
    assert result.passed is False
    assert "1 of 1 outputs differ" in result.detail


def test_bf16_without_log_probabilities_cannot_show_a_tie():
    blind = PlainOutput(prompt_id="p", text="def a c")
    assert gates.losslessness([blind], ["def b"], dtype="bfloat16").passed is False


def test_effective_setting_is_read_back_and_compared():
    asked = TreeSetting(block_size=8, node_budget=7)
    info = {"ddtree": {"mode": "tree", "block_size": 8, "depth": 7, "top_k": 7, "branching": 6, "node_budget": 7}}
    assert gates.setting_gate(asked, gates.effective_setting(info)).passed is True
    other = {"ddtree": {**info["ddtree"], "node_budget": 6}}
    assert gates.setting_gate(asked, gates.effective_setting(other)).passed is False
    assert gates.setting_gate(asked, gates.effective_setting({"version": "foreign"})).passed is None


def test_min_acceptance():
    assert gates.min_acceptance({"acceptance_length": 2.0}, 2.0, "tree").passed is True
    assert gates.min_acceptance({"acceptance_length": 1.9}, 2.0, "tree").passed is False
    assert gates.min_acceptance({"acceptance_length": None}, 2.0, "tree").passed is False
    assert gates.min_acceptance({}, 2.0, "plain") is None
    assert gates.min_acceptance({}, None, "tree") is None


@pytest.mark.parametrize(
    ("info", "wanted", "cap"),
    [
        ({"ddtree": {"full_context_requests": 12}}, 48, 12),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 12}]}, 48, 12),
        ({"ddtree": {"full_context_requests": 48}}, 48, None),
        ({"ddtree": {"full_context_requests": None}}, 48, None),
        ({"internal_states": [{}]}, 48, None),
        ({}, 48, None),
        ({"ddtree": {"full_context_requests": 1}}, None, None),
    ],
    ids=["embedded", "sglang", "enough", "unknown", "no-state", "foreign", "no-wish"],
)
def test_memory_that_caps_concurrency_is_told(info, wanted, cap):
    told = gates.capacity_warning(info, wanted)
    assert (told is None) == (cap is None)
    assert cap is None or f"memory holds {cap} requests" in told


def test_constraints_are_all_there_and_relative_to_their_limit():
    limits = {"ttft_p50_ms": 100.0, "tpot_p50_ms": 10.0}
    assert constraints_of(limits, {"ttft_p50_ms": 50.0, "tpot_p50_ms": 20.0}) == {
        "launch_ok": 0.0,
        "ttft_p50_ms": -0.5,
        "tpot_p50_ms": 1.0,
    }
    assert constraints_of(limits, None) == dict.fromkeys(("launch_ok", *limits), 1.0)
    assert constraints_of(limits, {"tpot_p50_ms": 5.0})["ttft_p50_ms"] > 0


@pytest.fixture
def trial(tmp_path):
    """Run one trial after its plain arm; returns the record."""

    def run(*options, setting=None, on_stage=lambda stage: None, **tables) -> TrialRecord:
        spec, setting = make_spec(**tables), setting or TreeSetting(node_budget=7)
        for number, arm, arm_options in ((-1, TreeSetting(mode="plain"), ()), (0, setting, options)):
            job = TrialJob(
                number=number,
                spec=spec,
                setting=arm,
                asked={"mode": arm.mode},
                workdir=tmp_path / f"arm{number}",
                plain_path=tmp_path / "plain.json",
            )
            backend = MockBackend(lease_dir=tmp_path / "leases", options=[*FAST, *arm_options])
            record = run_trial(job, backend, on_stage=on_stage if number == 0 else lambda stage: None)
        assert list((tmp_path / "leases").iterdir()) == []
        assert json.loads((tmp_path / "arm0" / "trial.json").read_text())["state"] == record.state
        return record

    return run


def test_healthy_trial(trial, tmp_path):
    stages = []
    record = trial(on_stage=stages.append)
    assert record.state == "complete"
    assert stages[0] == "launch"
    assert stages[-1] == "stop"
    assert "load 2/2" in stages
    assert {gate.name: gate.passed for gate in record.gates} == {"setting": True, "losslessness": True}
    assert set(record.timings_s) == {"launch", "gate", "warm", "load", "stop", "total"}
    parts_s = sum(seconds for name, seconds in record.timings_s.items() if name != "total")
    assert parts_s <= record.timings_s["total"] + 0.005, "no part is counted twice; each is rounded to a millisecond"
    assert record.metrics["num_requests"] == 2
    assert record.metrics["acceptance_length"] > 1
    assert record.stop["is_clean"]
    packed = list(read_requests(tmp_path / "arm0" / "requests.jsonl.zst"))
    assert len(packed) == 2
    assert not (tmp_path / "arm0" / "requests.jsonl").exists()
    assert TrialRecord.from_dict(json.loads((tmp_path / "arm0" / "trial.json").read_text())) == TrialRecord.from_dict(
        json.loads(json.dumps(record.to_dict()))
    )


def test_server_with_another_setting_than_asked_fails(trial):
    record = trial("--node-budget", "6")
    assert record.failure.kind == "setting_mismatch"
    assert "n6" in record.failure.reason


def test_acceptance_of_one_is_warned(trial):
    record = trial("--acceptance-length", "1")
    assert record.state == "complete"
    assert any("contributes nothing" in warning for warning in record.warnings)


def test_min_acceptance_gate_fails_the_trial(trial):
    record = trial("--acceptance-length", "2", gates={"num_gate_prompts": 1, "gate_max_tokens": 8, "min_acceptance": 5.0})
    assert record.failure.kind == "min_acceptance"


@pytest.mark.parametrize("fault", ["in_band_error", "truncated", "empty"])
def test_failed_requests_fail_the_trial(trial, fault):
    record = trial("--fault", fault)  # strikes streams only: readiness and gate are not streamed
    assert record.failure.kind == "failed_requests"
    assert record.failure.is_own_fault
    assert record.constraints["launch_ok"] > 0


def test_failed_requests_keep_their_records(trial, tmp_path):
    trial("--fault", "truncated")
    assert [r.outcome for r in read_requests(tmp_path / "arm0" / "requests.jsonl.zst")] == ["error", "error"]


def test_server_without_usage_gives_no_tokens(trial):
    record = trial("--usage", "none", "--no-meta-info", "--metrics", "none")
    assert record.failure.kind == "no_tokens"


def test_server_that_exits_in_the_load_is_seen_at_once(trial):
    record = trial("--exit-after", "4", "--log-text", "CUDA out of memory", load={"num_prompts": 50, "max_tokens": 12})
    assert record.failure.kind == "out_of_memory"
    assert "CUDA out of memory" in record.failure.log_tail


@pytest.mark.slow
def test_server_killed_in_the_load_is_the_machines_fault(trial, tmp_path):
    from ddtree_bench.backends.launch import group_members

    def kill_at_load(stage):
        if stage != "load 1/40":
            return
        lease = json.loads(next((tmp_path / "leases").iterdir()).read_text())
        for pid in group_members(lease["pgid"]):
            os.kill(pid, signal.SIGKILL)

    record = trial(on_stage=kill_at_load, load={"num_prompts": 40, "timeout_s": 600.0})
    assert record.failure.kind == "killed"
    assert not record.failure.is_own_fault


def test_gate_prompts_are_not_measured() -> None:
    """A server with a prefix cache would answer a measured prompt of the gate faster."""
    spec = make_spec(load={"num_prompts": 20, "num_warmups": 2}, gates={"num_gate_prompts": 3})
    asked = {prompt.prompt_id for prompt in gate_prompts(spec)}
    assert len(asked) == 3
    assert not asked & {prompt.prompt_id for prompt in workload_of(spec.load).prompts}
