"""Whole sweeps on mock servers: results folder, resume, refusals, failures of either kind, and the command line."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner
from mock_backend import MockBackend, make_spec

from ddtree_bench.backends.failures import is_own_fault
from ddtree_bench.cli.sweep import command as sweep_command
from ddtree_bench.config import SweepSpec, TreeSetting
from ddtree_bench.errors import DdtreeError, MissingPackageError, ServerError
from ddtree_bench.records import Failure, TrialRecord, read_baseline, read_trials, write_json
from ddtree_bench.sweep import run as run_module
from ddtree_bench.sweep.baselines import read_baselines
from ddtree_bench.sweep.plan import make_plan
from ddtree_bench.sweep.run import Observer, run_sweep
from ddtree_bench.trial.plain import gate_prompts, plain_key, write_plain
from ddtree_bench.trial.run import constraints_of

FAST = ("--ms-per-round", "1", "--first-token-ms", "1")


class Notes(Observer):
    def __init__(self):
        self.notes, self.records = [], []

    def note(self, text):
        self.notes.append(text)

    def ended(self, job, record, num_done):
        self.records.append(record)


class FakeExecutor:
    """Writes a trial's record without a server; `failure_of` says which settings fail, and how."""

    num_slots = 1

    def __init__(self, failure_of, metrics_of):
        self.failure_of, self.metrics_of = failure_of, metrics_of
        self.launches, self.job = [], None

    def submit(self, job):
        self.job = job
        self.launches.append(job.setting)

    def poll(self):
        job, failure = self.job, self.failure_of(self.job.setting)
        metrics = {"output_tok_s": 100.0 + job.setting.node_budget, "acceptance_length": 2.0, **self.metrics_of(job.setting)}
        metrics["ms_per_token"] = 1000.0 / metrics["output_tok_s"]
        metrics |= {"output_tokens": 100, "window_s": 100 / metrics["output_tok_s"]}
        record = TrialRecord(
            number=job.number,
            state="failed" if failure else "complete",
            asked=dict(job.asked),
            effective=dataclasses.asdict(job.setting),
            label=job.setting.label(),
            metrics={} if failure else metrics,
            failure=Failure(kind=failure, reason="so it was told", is_own_fault=is_own_fault(failure)) if failure else None,
            constraints=constraints_of(job.spec.constraints, None if failure else metrics),
            attempt=job.attempt,
            timings_s={"total": 2.0},
        )
        write_json(job.workdir / "trial.json", record.to_dict())
        write_plain(job.plain_path, plain_key(job.spec, gate_prompts(job.spec)), ())
        return [(job, record)]

    def cancel(self):
        pass


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Run a sweep in one folder without servers; returns (result, executor, observer)."""

    def run(spec=None, *, failure_of=lambda setting: None, metrics_of=lambda setting: {}):
        executor, observer = FakeExecutor(failure_of, metrics_of), Notes()
        monkeypatch.setattr(run_module, "get_executor", lambda *_: executor)
        spec = spec or make_spec(study={"trials": 3})
        result = run_sweep(spec, tmp_path / "results", observer=observer, lease_dir=tmp_path)
        return result, executor, observer

    return run


@pytest.fixture
def go_mock(tmp_path):
    """Run a sweep on mock servers; returns (result, backend)."""

    def run(spec=None, *, options_of=lambda setting: (), **more):
        backend = MockBackend(lease_dir=tmp_path / "leases", options=FAST, options_of=options_of)
        spec = spec or make_spec(study={"trials": 3})
        folder, leases = tmp_path / "results", tmp_path / "leases"
        return run_sweep(spec, folder, backend=backend, lease_dir=leases, **more), backend

    return run


def test_results_folder_holds_everything_and_nothing_is_left_running(go_mock, tmp_path):
    result, backend = go_mock(make_spec(study={"trials": 3}))
    folder = result.results_dir
    assert [setting.mode for setting in backend.launches] == ["plain", "linear", "tree", "tree", "plain"]
    names = {path.name for path in folder.iterdir()}
    assert names >= {"study.toml", "journal.log", "trials.csv", "pareto.csv", "best.toml", "best.sh", "ledger.json", "plain.json"}
    assert {p.name for p in (folder / "trial-002").iterdir()} == {"trial.json", "requests.jsonl.zst", "server.log"}
    assert len(read_trials(folder)) == 3
    assert read_baseline(folder).metrics["output_tok_s"] > 0
    assert list((tmp_path / "leases").iterdir()) == []

    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [int(row["trial"]) for row in rows] == [0, 1, 2]
    best = tomllib.loads((folder / "best.toml").read_text())
    assert TreeSetting(**best["best"]).canonical().label() == result.best.label
    assert best["linear"]["mode"] == "linear"
    pair_tok_s = [record.metrics["output_tok_s"] for record in read_baselines(folder).values()]
    assert min(pair_tok_s) <= best["measured"]["plain"]["output_tok_s"] <= max(pair_tok_s), "pooled over both launches"
    assert best["measured"]["drift"]["num_baselines"] == 2
    assert {row["run"] for row in rows} == {"mock"}
    made = best["provenance"]
    assert {(row["machine"], row["commit"], row["when_utc"]) for row in rows} == {
        (made["machine"], made.get("commit", ""), made["when_utc"])
    }
    assert {row["is_dirty"] for row in rows} == {str(made.get("is_dirty", ""))}
    assert "gpu" in rows[0]
    for name in ("ledger.json", "plain.json"):
        assert json.loads((folder / name).read_text())["provenance"]["machine"] == made["machine"], name
    assert tomllib.loads((folder / "study.toml").read_text())["provenance"]["run"] == "mock"
    assert result.best.metrics["ms_per_token"] == min(float(row["ms_per_token"]) for row in rows)
    assert "torch" in best["provenance"]["versions"]
    assert SweepSpec.from_toml(folder / "study.toml").study.trials == 3
    script = (folder / "best.sh").read_text()
    assert os.access(folder / "best.sh", os.X_OK)
    assert "exec ddtree-bench serve" in script
    assert f"machine {best['provenance']['machine']}, {best['provenance']['when_utc']}" in script
    assert sys.executable not in "".join(p.read_text() for p in folder.glob("trial-*/trial.json")) + script
    assert result.ledger["num_launches"] == 5


def test_again_goes_on_to_the_total_and_measures_plain_once(go):
    first, _, _ = go(make_spec(study={"trials": 2}))
    before = {t.number: t.to_dict() for t in first.trials}
    second, backend, observer = go(make_spec(study={"trials": 4}))
    assert [setting.mode for setting in backend.launches] == ["tree", "tree", "plain"]
    assert [t.number for t in second.trials] == [0, 1, 2, 3]
    assert {n: second.trials[n].to_dict() for n in before} == before
    third, backend, _ = go(make_spec(study={"trials": 4}))
    assert backend.launches == []
    assert third.to_dict() == second.to_dict()
    assert [record.number for record in observer.records] == [2, 3, -3]


def drifting(ms_of_launch):
    """Plain decoding takes the given ms per token at each of its launches in turn."""
    left = list(ms_of_launch)
    return lambda setting: {"output_tok_s": 1000.0 / left.pop(0)} if setting.mode == "plain" else {}


def test_drift_of_plain_over_the_limit_withholds_the_factors_and_keeps_the_ranking(go):
    from ddtree_bench.cli.sweep import _text
    from ddtree_bench.report.html import render
    from ddtree_bench.report.study import read_study
    from ddtree_bench.report.tables import setting_rows

    calm, _, _ = go(make_spec(study={"trials": 2}), metrics_of=drifting([10.0, 10.2]))
    assert calm.drift.share == pytest.approx(0.02)
    assert "x plain" in _text(calm)
    assert "drifted by 2 % over 2 launches, limit 5 %" in _text(calm)
    assert setting_rows(read_study(calm.results_dir))[0].times_plain is not None
    more, _, observer = go(make_spec(study={"trials": 3}), metrics_of=drifting([11.2]))
    told = "not told: plain decoding drifted by 12 % during the sweep, limit 5 %"
    assert told in observer.notes[-1]
    assert told in _text(more)
    assert "x plain" not in _text(more)
    assert told in more.to_dict()["drift"]["text"]
    assert told in tomllib.loads((more.results_dir / "best.toml").read_text())["measured"]["drift"]["text"]
    assert more.best.metrics["ms_per_token"] == min(t.metrics["ms_per_token"] for t in more.trials)
    study = read_study(more.results_dir)
    rows = setting_rows(study)
    assert {row.times_plain for row in rows} == {None}
    assert [row.ms_per_token for row in rows] == sorted(row.ms_per_token for row in rows)
    assert told in render(study, {})


def test_drift_that_is_not_checked_costs_no_launch_and_keeps_the_factors(go):
    from ddtree_bench.cli.sweep import _text

    result, executor, _ = go(make_spec(study={"trials": 2}, gates={"drift": "none"}))
    assert [setting.mode for setting in executor.launches].count("plain") == 1
    assert "x plain" in _text(result)
    assert "drifted" not in _text(result)


def test_plain_is_measured_again_every_ten_trials_and_after_the_last(go, tmp_path):
    result, executor, _ = go(make_spec(study={"trials": 12}))
    modes = [setting.mode for setting in executor.launches]
    assert [i for i, mode in enumerate(modes) if mode == "plain"] == [0, 11, 14]
    names = [f"baseline-plain{end}" for end in ("", "-2", "-3")]
    assert sorted(p.name for p in (tmp_path / "results").glob("baseline-*")) == names
    assert [record.asked["after_trials"] for record in read_baselines(tmp_path / "results").values()] == [0, 10, 12]
    assert len(result.trials) == 12, "plain decoding is no trial"
    assert result.ledger["num_launches"] == 15
    assert make_plan(make_spec(study={"trials": 12}), tmp_path / "new", MockBackend(lease_dir=tmp_path)).num_launches == 15


def test_a_kill_before_the_last_plain_launch_is_made_good_by_the_next_run(go):
    first, _, _ = go(make_spec(study={"trials": 2}))
    shutil.rmtree(first.results_dir / "baseline-plain-2")
    (first.results_dir / "baseline-plain-2").mkdir()
    (first.results_dir / "baseline-plain-2" / "requests.jsonl").write_text("{}\n")  # a launch that was cut off has no record
    second, executor, _ = go(make_spec(study={"trials": 2}))
    assert [setting.mode for setting in executor.launches] == ["plain"]
    assert second.drift.num_baselines == 2
    assert [t.to_dict() for t in second.trials] == [t.to_dict() for t in first.trials]


def test_plain_that_cannot_be_measured_again_ends_nothing_and_withholds_the_factors(go):
    left = [None]
    result, executor, observer = go(
        make_spec(study={"trials": 2}),
        failure_of=lambda s: (left.pop() if left else "port_in_use") if s.mode == "plain" else None,
    )
    assert [setting.mode for setting in executor.launches].count("plain") == 4
    assert any("could not be measured again" in note for note in observer.notes)
    assert "measured once" in result.drift.reason
    assert result.best is not None
    assert result.ledger["num_launches"] == 6


def test_another_spec_in_the_same_folder_is_refused_with_the_difference(go):
    go()
    with pytest.raises(DdtreeError) as error:
        go(make_spec(study={"trials": 3}, load={"max_tokens": 13}, space={"top_k": [2, 8]}))
    assert "load.max_tokens: the study has 12, given 13" in str(error.value)
    assert "space.top_k: the study has [4, 8], given [2, 8]" in str(error.value)
    assert "study.trials" not in str(error.value)


def test_small_space_ends_the_sweep_without_repeats(go):
    spec = make_spec(study={"trials": 30}, space={"block_size": 8, "node_budget": [1, 2, 3], "top_k": 4})
    result, backend, observer = go(spec)
    assert result.is_exhausted
    assert len(result.trials) == len(backend.launches) - 2 == 4
    assert any("every one of the 4 settings" in note for note in observer.notes)


def test_own_fault_is_launched_once_and_never_on_the_front(go):
    result, backend, _ = go(
        make_spec(study={"trials": 8}), failure_of=lambda s: "out_of_memory" if s.mode == "tree" and s.node_budget == 31 else None
    )
    bad = [trial for trial in result.trials if trial.failure is not None]
    assert {trial.failure.kind for trial in bad} == {"out_of_memory"}
    assert len(backend.launches) == 10
    assert len(set(backend.launches)) == 9, "only plain decoding runs twice"
    assert all(trial.failure is None for trial in result.front)
    assert len(result.trials) == 8


def test_machine_fault_is_tried_twice_more_then_settled(go):
    result, _, observer = go(failure_of=lambda s: "port_in_use" if s.mode == "linear" else None)
    assert [t.number for t in result.trials] == [0, 1, 2]
    spoiled = [t for t in result.trials if t.failure is not None]
    assert [(t.failure.kind, t.attempt) for t in spoiled] == [("port_in_use", 3)]
    assert [r.attempt for r in observer.records if r.failure] == [1, 2, 3]
    assert len(list((result.results_dir / "failed-attempts").iterdir())) == 2
    assert result.ledger["num_launches"] == 7


def test_lossy_output_is_a_failed_trial(go_mock):
    result, _ = go_mock(
        make_spec(study={"trials": 2}), options_of=lambda s: ("--bends-text-every", "1") if s.mode == "linear" else ()
    )
    failure = result.trials[0].failure
    assert failure.kind == "losslessness"
    assert "differ from plain decoding" in failure.reason
    assert result.best_linear is None
    assert result.best_tree is not None


def test_every_trial_failing_has_no_best(go):
    result, _, _ = go(failure_of=lambda s: None if s.mode == "plain" else "http_503")
    assert result.best is None
    assert result.front == []
    assert not (result.results_dir / "best.sh").exists()
    assert {t.failure.kind for t in result.trials} == {"http_503"}


def test_plain_arm_that_fails_stops_the_sweep(go):
    with pytest.raises(ServerError, match="plain decoding must be measured before a sweep"):
        go(failure_of=lambda s: "exited")


def test_constraint_that_is_violated_takes_a_trial_off_the_front(go):
    spec = make_spec(study={"trials": 3}, constraints={"ttft_mean_ms": 40.0})
    result, _, _ = go(spec, metrics_of=lambda s: {"ttft_mean_ms": 80.0 if s.mode == "linear" else 20.0})
    assert result.trials[0].constraints["ttft_mean_ms"] > 0
    assert 0 not in [t.number for t in result.front]
    assert result.best_linear is None


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"constraints": {"speed": 1.0}}, "key of .constraints. must be one of"),
        ({"constraints": {"ttft_p99_ms": 100.0}}, "load.num_prompts must be at least"),
        ({"constraints": {"ttft_p50_ms": 0}}, "greater than 0"),
        ({"study": {"replicates": 2}}, "replicates must be 1"),
        ({"server": {"mode": "plain"}}, "nothing to search"),
    ],
    ids=["unknown", "too-few", "zero", "replicates", "plain"],
)
def test_a_spec_that_cannot_run_is_refused_before_anything_starts(go, tables, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        go(make_spec(**tables))
    assert not (tmp_path / "results").exists()


def test_backends_that_cannot_sweep_are_refused(tmp_path):
    attach = make_spec(server={"backend": "attach", "url": "http://127.0.0.1:9"})
    with pytest.raises(ValueError, match="launches servers for a sweep"):
        run_sweep(attach, tmp_path / "r")
    with pytest.raises(ValueError, match="mode must be one that the backend 'sglang' can run"):
        run_sweep(make_spec(server={"backend": "sglang", "device": "cuda"}), tmp_path / "r")
    linear = {"server": {"backend": "sglang", "device": "cuda", "mode": "linear"}, "space": {"block_size": 16, "depth": [3, 7]}}
    with pytest.raises(ValueError, match="given depth: the server would ignore them"):
        run_sweep(SweepSpec.from_dict(linear), tmp_path / "r")
    with pytest.raises(ValueError, match="--reuse-server needs a backend"):
        run_sweep(make_spec(), tmp_path / "r", reuse_server=True)


def test_ray_says_what_is_missing(go_mock, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"ddtree-bench\[ray\]"):
        go_mock(executor="ray")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(DdtreeError, match="later"):
        go_mock(executor="ray://host:1")
    with pytest.raises(ValueError, match="--executor must be one of"):
        go_mock(executor="slurm")


def write_spec(tmp_path):
    from ddtree_bench.sweep.toml import to_toml

    file = tmp_path / "sweep.toml"
    file.write_text(to_toml(make_spec(study={"trials": 3}).to_dict()))
    return file


def test_dry_run_tells_and_starts_nothing(tmp_path):
    done = CliRunner().invoke(sweep_command, [str(write_spec(tmp_path)), "--results", str(tmp_path / "r"), "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout.splitlines()[-1])
    assert plan["num_launches"] == 5
    assert plan["start"][0].startswith("linear")
    assert plan["gpu_hours"] is None
    assert plan["total_s"] > 0
    assert not (tmp_path / "r").exists()


def test_command_line_prints_front_and_command(tmp_path, monkeypatch):
    backend = MockBackend(lease_dir=tmp_path / "leases", options=FAST)
    monkeypatch.setattr(run_module, "get_backend", lambda name: backend)
    monkeypatch.setattr(run_module, "default_lease_dir", lambda: tmp_path / "leases")
    args = [str(write_spec(tmp_path)), "--results", str(tmp_path / "r"), "--set", "study.trials=2"]
    done = CliRunner().invoke(sweep_command, args)
    assert done.exit_code == 0, done.output
    assert "[2/2] trial 1 tree" in done.stderr
    assert "Pareto front" in done.stdout
    assert done.stdout.splitlines()[-1].strip().startswith("ddtree-bench serve")
    again = CliRunner().invoke(sweep_command, [*args, "--json"])
    assert json.loads(again.stdout.splitlines()[-1])["num_trials"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)], ids=["SIGINT", "SIGTERM"])
def test_signal_stops_the_server_and_the_same_command_continues(tmp_path, number, status):
    file = write_spec(tmp_path)
    args = [sys.executable, run_module.__file__.replace("ddtree_bench/sweep/run.py", "tests/sweep/mock_backend.py")]
    args += [str(file), str(tmp_path / "r"), str(tmp_path / "leases")]
    slow = subprocess.Popen([*args, "--ms-per-round", "150"], stderr=subprocess.PIPE, text=True)
    while "trial 1 " not in slow.stderr.readline():
        assert slow.poll() is None
    os.kill(slow.pid, number)
    slow.communicate(timeout=60)
    assert slow.returncode == status
    assert list((tmp_path / "leases").iterdir()) == []
    done = subprocess.run([*args, *FAST], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "continues: 1 of 3" in done.stderr
    assert [t.number for t in read_trials(tmp_path / "r")] == [0, 1, 2]


def test_spec_under_which_nothing_was_measured_gives_way_to_the_right_one(go, tmp_path):
    with pytest.raises(ServerError, match="plain decoding must be measured"):
        go(make_spec(server={"model": "tiny-dens"}), failure_of=lambda setting: "unsupported")
    result, _, _ = go(make_spec(study={"trials": 1}))
    assert result.best is not None
    with pytest.raises(DdtreeError, match=r"server\.model: the study has 'tiny-dense', given 'tiny-dens'"):
        go(make_spec(server={"model": "tiny-dens"}, study={"trials": 1}))
