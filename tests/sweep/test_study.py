"""Ask and tell: repeats, failures of either kind, resume from trial files, exhausted spaces, every sampler."""

from __future__ import annotations

import optuna
import pytest
from records import asked_of, failed, record

from ddtree_bench.config import StudySpec, SweepSpec
from ddtree_bench.errors import DdtreeError
from ddtree_bench.sweep.journal import open_storage
from ddtree_bench.sweep.objective import Reference
from ddtree_bench.sweep.space import Space
from ddtree_bench.sweep.study import MAX_ATTEMPTS, Study, seed_of

STATE = optuna.trial.TrialState
SPACE = {"block_size": [8, 16], "node_budget": [3, 7, 15, 31], "top_k": [4, 8]}


def open_study(folder, *, knobs=None, constraints=(), **spec) -> Study:
    space = Space.of(SweepSpec.from_dict({"space": knobs or SPACE}))
    return Study(StudySpec(**spec), space, open_storage(folder, None), Reference(output_tok_s=50.0), constraints)


def optuna_trials(study, *states):
    return study._study.get_trials(deepcopy=False, states=states or None)


def measure(study, number, tok_s=None):
    asked = study.ask(number)
    result = record(number, tok_s or 100.0 + asked.setting.node_budget, 2.0, asked=asked.values)
    assert study.tell(asked, result)
    return result


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsga2", "grid", "gp"])
def test_every_sampler_never_launches_a_setting_twice_and_ends_with_the_space(tmp_path, sampler):
    knobs = {"block_size": 16, "node_budget": [3, 7, 15], "top_k": [2, 8]}
    study = open_study(tmp_path, sampler=sampler, knobs=knobs)
    labels = [measure(study, number).label for number in range(study.num_legal)]
    assert len(labels) == len({str(label) for label in labels}) == study.num_legal
    assert study.ask(99) is None
    assert study.is_exhausted()
    assert optuna_trials(study, STATE.RUNNING, STATE.WAITING) == []
    assert len(optuna_trials(study, STATE.COMPLETE)) == study.num_legal
    assert study.num_repeats == len(optuna_trials(study, STATE.PRUNED))


def test_own_fault_completes_at_the_reference_point_with_every_constraint_violated(tmp_path):
    study = open_study(tmp_path, constraints=("ttft_p50_ms",))
    measure(study, 0)
    asked = study.ask(1)
    assert study.tell(asked, failed(1, asked=asked.values))
    trial = optuna_trials(study, STATE.COMPLETE)[-1]
    assert trial.values == [50.0, 1.0]
    assert trial.constraints == {"launch_ok": 1.0, "ttft_p50_ms": 1.0}
    assert study.ask(2).setting != asked.setting


def test_machine_fault_is_tried_again_at_most_twice(tmp_path):
    study = open_study(tmp_path)
    first = study.ask(0)
    asked = first
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert study.attempts(0) == attempt - 1
        assert asked.setting == first.setting
        spoiled = failed(0, "port_in_use", is_own_fault=False, attempt=attempt, asked=asked.values)
        assert study.tell(asked, spoiled) == (attempt == MAX_ATTEMPTS)
        asked = study.ask(0 if attempt < MAX_ATTEMPTS else 1)
    assert asked.setting != first.setting
    assert len(optuna_trials(study, STATE.FAIL)) == MAX_ATTEMPTS
    assert optuna_trials(study, STATE.COMPLETE) == []


def test_resume_fails_orphans_and_asks_the_same_setting_again(tmp_path):
    study = open_study(tmp_path)
    done = [measure(study, number) for number in range(3)]
    cut_off = study.ask(3)
    study._study.enqueue_trial({"node_budget": 0})
    again = open_study(tmp_path)
    assert any("trial 3 was cut off" in line for line in again.reconcile(done))
    assert optuna_trials(again, STATE.RUNNING, STATE.WAITING) == []
    asked = again.ask(3)
    assert asked.setting == cut_off.setting


def test_resume_adds_what_was_written_and_not_told(tmp_path):
    study = open_study(tmp_path)
    done = [measure(study, number) for number in range(2)]
    asked = study.ask(2)
    done.append(record(2, 300.0, 5.0, asked=asked.values))
    again = open_study(tmp_path)
    assert "trial 2 was on disk and not in the study: added" in again.reconcile(done)
    assert sorted(t.user_attrs["trial"] for t in optuna_trials(again, STATE.COMPLETE)) == [0, 1, 2]
    assert optuna_trials(again, STATE.COMPLETE)[-1].values == [300.0, 5.0]
    assert again.ask(3).setting != asked.setting
    assert len(again.reconcile(done)) == 1, "told once; only the trial just asked is an orphan now"


def test_a_lost_journal_is_rebuilt_from_the_trial_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    study = open_study(tmp_path / "a")
    done = [measure(study, number) for number in range(4)]
    done.append(failed(4, asked=asked_of(block_size=8, node_budget=31, top_k=4)))
    again = open_study(tmp_path / "b")
    again.reconcile(done)
    complete = optuna_trials(again, STATE.COMPLETE)
    assert [t.user_attrs["trial"] for t in complete] == [0, 1, 2, 3, 4]
    assert complete[-1].constraints == {"launch_ok": 1.0}
    assert [t.params for t in complete[:4]] == [t.params for t in optuna_trials(study, STATE.COMPLETE)]


def test_interrupted_trial_is_asked_again_first(tmp_path):
    study = open_study(tmp_path)
    done = [measure(study, number) for number in range(8)]
    asked = study.ask(8)
    study.tell_interrupted(asked)
    again = open_study(tmp_path)
    again.reconcile(done)
    assert again.ask(8).setting == asked.setting


@pytest.mark.parametrize("objectives", [("output_tok_s",), ("acceptance_length", "output_tok_s")], ids=["fewer", "reordered"])
def test_other_objectives_on_resume_are_refused(tmp_path, objectives):
    open_study(tmp_path)
    with pytest.raises(DdtreeError, match=r"study\.objectives must be those"):
        open_study(tmp_path, objectives=objectives)


def test_one_objective(tmp_path):
    study = open_study(tmp_path, objectives=("output_tok_s",))
    for number in range(12):
        measure(study, number)
    assert len(optuna_trials(study, STATE.COMPLETE)) == 12


def test_resumed_sampler_does_not_replay_its_start():
    assert len({seed_of(0, n) for n in range(50)}) == 50
    assert seed_of(3, 5) == seed_of(3, 5) != seed_of(4, 5)
