"""One trial: gates as pure functions, then whole trials on mock servers, healthy and not."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "sweep"))
sys.path.insert(0, str(Path(__file__).parent / "fakes"))
from mock_backend import MockBackend, make_spec
from mock_server import running_mock

from ddtree_bench.backends import http
from ddtree_bench.config import TreeSetting
from ddtree_bench.load.workloads import workload_of
from ddtree_bench.records import TrialRecord, read_requests
from ddtree_bench.trial import TrialJob, gates, run_trial
from ddtree_bench.trial import run as trial_run
from ddtree_bench.trial.plain import PlainOutput, collect_texts, gate_prompts, plain_key, read_plain, sampled
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
    assert result.numbers == {"num_prompts": 1, "num_equal": 1, "num_ties": 0, "tie_share": 0.0, "concurrency": 1}


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


@pytest.mark.parametrize(
    ("top_logit", "is_tie"), [(31.0, True), (16.0, True), (15.9, False), (-16.0, True), (4.0, False), (0.0, False)], ids=str
)
def test_a_tie_is_two_ulp_of_the_logit_that_the_server_tells(top_logit, is_tie):
    """The same gap of 0.25 is rounding at a logit of 16 and a bug at a logit of 4."""
    told = dataclasses.replace(PLAIN, top_logits=(0.0, top_logit, 0.0))
    result = gates.losslessness([told], ["def b z"], dtype="bfloat16")
    assert result.passed is is_tie
    assert "assumes" not in result.detail


def test_a_tie_by_an_unknown_logit_says_what_it_assumes():
    result = gates.losslessness([PLAIN], ["def b z"], dtype="bfloat16")
    assert result.passed
    assert "tie limit assumes logits of at most 16" in result.detail


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
    assert record.metrics["stages_s"] is None, "the mock tells no stages"
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
    record = trial("--exit-after", "5", "--log-text", "CUDA out of memory", load={"num_prompts": 50, "max_tokens": 12})
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


@pytest.mark.parametrize(
    ("load", "concurrency"),
    [
        ({"max_concurrency": 1}, 1),
        ({"max_concurrency": 2}, 2),
        ({"max_concurrency": 16}, 2),
        ({"max_concurrency": "none", "request_rate": 5.0}, 2),
    ],
    ids=["alone", "two", "sixteen", "open-loop"],
)
def test_the_gate_asks_as_many_at_once_as_the_load_sends(trial, load, concurrency):
    """With one gate prompt a second is added where the load runs several: a fault of batches must be able to show."""
    record = trial(load={"num_prompts": 4, **load})
    gate = next(gate for gate in record.gates if gate.name == "losslessness")
    assert gate.passed
    assert (gate.numbers["num_prompts"], gate.numbers["concurrency"]) == (concurrency, concurrency)


def test_gate_texts_are_in_flight_together_and_keep_their_order():
    prompts = gate_prompts(make_spec(load={"max_concurrency": 3}, gates={"num_gate_prompts": 3}))
    with running_mock(first_token_ms=100.0) as mock:
        together = collect_texts(mock.url, "mock", prompts, max_tokens=8, timeout_s=60, concurrency=3)
        assert mock.server.peak_in_flight == 3
        assert together == collect_texts(mock.url, "mock", prompts, max_tokens=8, timeout_s=60)


KEYED = {"ddtree": {"noise_keyed_by_position": True}}
AT_2 = {"num_prompts": 2, "temperature": 0.7}


def tells(monkeypatch, told):
    """Let servers tell more in /server_info."""
    real = trial_run.server_info
    monkeypatch.setattr(trial_run, "server_info", lambda url: {**real(url), **told})


def test_a_sampled_load_is_gated_at_its_temperature_with_fixed_seeds(trial, tmp_path, monkeypatch):
    tells(monkeypatch, KEYED)
    record = trial(load=AT_2)
    passed = {gate.name: gate.passed for gate in record.gates}
    assert (passed["losslessness"], passed["losslessness at temperature"]) == (True, True)
    spec = make_spec(load=AT_2)
    kept = read_plain(tmp_path / "plain.json", plain_key(spec, gate_prompts(spec)))
    assert [output.temperature for output in kept] == [0.0, 0.0, 0.7, 0.7]
    assert len({output.text for output in kept}) == 4
    seeds = [prompt.seed for prompt in sampled(gate_prompts(spec), 0.7)]
    assert seeds == [prompt.seed for prompt in gate_prompts(spec)]
    assert plain_key(spec, gate_prompts(spec)) != plain_key(make_spec(load={**AT_2, "temperature": 0.8}), gate_prompts(spec))


def test_text_that_is_lossy_only_when_sampled_fails_the_trial(trial, monkeypatch):
    tells(monkeypatch, KEYED)
    record = trial("--bends-text-every", "4", load=AT_2)  # 1 ready, 2 and 3 greedy, 4 and 5 sampled
    assert record.failure.kind == "losslessness"
    assert "gate losslessness at temperature must pass" in record.failure.reason


@pytest.mark.parametrize(
    ("told", "dtype", "words"),
    [({}, "float32", "does not tell that its noise is keyed"), (KEYED, "bfloat16", "in bfloat16 sampled texts may part")],
    ids=["foreign", "bfloat16"],
)
def test_sampled_text_that_cannot_be_compared_is_told_as_not_checked(trial, monkeypatch, told, dtype, words):
    tells(monkeypatch, told)
    record = trial(load=AT_2, server={"dtype": dtype})
    gate = next(gate for gate in record.gates if gate.name == "losslessness at temperature")
    assert record.state == "complete"
    assert gate.passed is None
    assert gate.detail.startswith("not checked: ")
    assert words in gate.detail


def test_a_gate_without_plain_outputs_is_the_machines_fault_and_no_silent_pass(tmp_path):
    job = TrialJob(
        number=0,
        spec=make_spec(),
        setting=TreeSetting(node_budget=7),
        asked={"mode": "tree"},
        workdir=tmp_path / "trial",
        plain_path=tmp_path / "plain.json",
    )
    record = run_trial(job, MockBackend(lease_dir=tmp_path / "leases", options=FAST))
    assert (record.failure.kind, record.failure.is_own_fault) == ("no_plain_outputs", False)
    assert "must be checked" in record.failure.reason
    assert list((tmp_path / "leases").iterdir()) == []


@pytest.mark.parametrize(
    ("after", "stages_s"),
    [({"draft": 7.0, "verify": 4.5, "unattributed": 0.25}, {"draft": 2.0, "verify": 3.5, "unattributed": 0.25}), ({}, None)],
    ids=["told", "reset"],
)
def test_stages_are_those_of_the_measured_window_alone(tmp_path, monkeypatch, after, stages_s):
    """Before the window, start and warm-up have taken 5 s of drafting."""
    told = [{"draft": 3.0}, {"draft": 5.0, "verify": 1.0}, after]  # before the gates, at the window's start, after it
    sent = []

    def tell(url):
        sent.append(int(http.get(f"{url}/metrics").partition("request_success_total{")[2].partition("} ")[2].split()[0]))
        return {"ddtree": {"stats": {"stage_seconds": told.pop(0)}}}

    monkeypatch.setattr(trial_run, "server_info", tell)
    job = TrialJob(
        number=0,
        spec=make_spec(load={"num_prompts": 4, "num_warmups": 3}, gates={"losslessness": False}),
        setting=TreeSetting(node_budget=7),
        asked={"mode": "tree"},
        workdir=tmp_path / "trial",
        plain_path=tmp_path / "plain.json",
    )
    record = run_trial(job, MockBackend(lease_dir=tmp_path / "leases", options=FAST))
    assert record.metrics["stages_s"] == stages_s
    assert [number - sent[0] for number in sent] == [0, 3, 7], "after the warm-up of 3, and after the 4 that count"
    assert record.metrics["num_requests"] == 4


def test_gate_prompts_are_not_measured() -> None:
    """A server with a prefix cache would answer a measured prompt of the gate faster."""
    spec = make_spec(load={"num_prompts": 20, "num_warmups": 2}, gates={"num_gate_prompts": 3})
    asked = {prompt.prompt_id for prompt in gate_prompts(spec)}
    assert len(asked) == 3
    assert not asked & {prompt.prompt_id for prompt in workload_of(spec.load).prompts}
