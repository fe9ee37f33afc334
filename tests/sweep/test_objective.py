"""The front and the best, with ties, one trial, failures, failed gates, violated constraints and unknown numbers."""

from __future__ import annotations

import csv

import pytest
from records import asked_of, failed, record

from ddtree_bench.config import StudySpec, TreeSetting
from ddtree_bench.records import GateResult
from ddtree_bench.sweep.objective import Reference, best_trial, objective_values, pareto_front
from ddtree_bench.sweep.results import trials_csv
from ddtree_bench.sweep.show import outcome

BOTH = ("output_tok_s", "acceptance_length")


def numbers(records):
    return [r.number for r in records]


def test_no_trial_and_one_trial():
    assert pareto_front([], BOTH) == []
    assert best_trial([]) is None
    assert numbers(pareto_front([record(0)], BOTH)) == [0]
    assert best_trial([record(0)]).number == 0


def test_dominated_trials_leave_the_front():
    trials = [record(0, 100, 4.0), record(1, 120, 3.0), record(2, 90, 3.5), record(3, 110, 3.0)]
    assert numbers(pareto_front(trials, BOTH)) == [1, 0]


def test_equals_all_stay_on_the_front():
    assert numbers(pareto_front([record(0, 100, 2), record(1, 100, 2)], BOTH)) == [0, 1]


def test_best_is_by_tokens_a_second_never_by_acceptance():
    assert best_trial([record(0, 130, 2.0), record(1, 90, 9.0)]).number == 0


def test_equal_speed_prefers_the_narrower_verify_then_the_earlier():
    trials = [record(0, asked=asked_of(node_budget=63)), record(1, asked=asked_of(node_budget=7)), record(2, 99)]
    assert best_trial(trials).number == 1
    same = asked_of(node_budget=7)
    assert best_trial([record(5, asked=same), record(4, asked=same)]).number == 4


def test_what_failed_or_violates_is_never_shown_as_a_result():
    bad = [
        failed(0),
        record(1, 900, 9, constraints={"launch_ok": 0.0, "ttft_p50_ms": 0.1}),
        record(2, 900, 9, gate=False),
    ]
    assert not any(r.is_feasible for r in bad)
    assert numbers(pareto_front([*bad, record(3)], BOTH)) == [3]
    assert best_trial(bad) is None


def test_constraint_met_exactly_is_feasible_and_an_unchecked_gate_is_no_failure():
    assert record(0, constraints={"launch_ok": 0.0, "ttft_p50_ms": 0.0}).is_feasible
    assert record(0, gate=None).is_feasible


def test_best_is_by_ms_per_token_where_the_rate_says_otherwise():
    """In an open loop every setting gives the rate that arrives; its time per token still differs."""
    slow, fast = record(0, 100.0), record(1, 99.9)
    slow.metrics["ms_per_token"], fast.metrics["ms_per_token"] = 20.0, 10.0
    assert best_trial([slow, fast]).number == 1


def test_best_of_a_mode():
    trials = [record(0, 100), record(1, 90, asked=asked_of(mode="linear"))]
    assert best_trial(trials, "linear").number == 1
    assert best_trial(trials[:1], "linear") is None


def test_unknown_acceptance_does_not_push_a_trial_from_the_front_of_speed():
    trials = [record(0, 120, None), record(1, 100, 2.0)]
    assert numbers(pareto_front(trials, BOTH)) == [0, 1]


def test_values_told_are_finite_and_a_failure_is_the_reference_point():
    reference = Reference(output_tok_s=50.0)
    assert objective_values(failed(0), BOTH, reference) == [50.0, 1.0]
    assert objective_values(record(1, 80, None), BOTH, reference) == [80.0, 1.0]
    assert objective_values(record(1, 80, 3.0), BOTH[::-1], reference) == [3.0, 80.0]


@pytest.mark.parametrize(
    ("objectives", "words"),
    [
        (("acceptance_length",), "must hold output_tok_s"),
        (("draft_acceptance_rate",), "must be one of"),
        (("output_tok_s", "draft_acceptance_rate"), "must be one of"),
    ],
    ids=["length-alone", "rate", "speed-and-rate"],
)
def test_a_search_always_follows_speed_and_never_the_acceptance_rate(objectives, words):
    with pytest.raises(ValueError, match=words):
        StudySpec(objectives=objectives)


def test_verify_width_counts_the_root_in_every_convention():
    assert TreeSetting(node_budget=64).verify_width == 65
    assert TreeSetting(node_budget=63).verify_width == 64
    assert TreeSetting(mode="linear", block_size=16).verify_width == 16
    assert TreeSetting(mode="plain").verify_width == 1


def test_a_printed_acceptance_is_named_length_because_without_the_bonus_it_differs_by_one():
    assert outcome(record(0, 100.0, 2.0)).endswith("100.0 tok/s, acceptance length 2.00")


def test_trials_csv_names_the_verify_width_beside_the_budget():
    columns, row = list(csv.reader(trials_csv([record(0, asked=asked_of(node_budget=64))]).splitlines()))
    told = dict(zip(columns, row, strict=True))
    assert (told["node_budget"], told["verify_width"]) == ("64", "65")


def test_trials_csv_tells_where_each_row_was_measured():
    made = {"machine": "m-x2", "commit": "c0ffee", "is_dirty": True, "when_utc": "2030-01-01T00:00:00+00:00"}
    gpus = [{"name": "GPU A", "driver": "1.2", "memory_mib": "9"}] * 2
    text = trials_csv([record(0, provenance={**made, "gpus": gpus}), record(1)], run="mine")
    first, second = csv.DictReader(text.splitlines())
    assert {name: first[name] for name in made} == {**made, "is_dirty": "True"}
    assert (first["run"], first["gpu"]) == ("mine", "GPU A, driver 1.2; GPU A, driver 1.2")
    assert (second["run"], second["machine"], second["gpu"]) == ("mine", "", "")


def test_an_unchecked_gate_is_told_in_the_outcome():
    assert outcome(record(0, 100.0, 2.0, gates=(GateResult(name="losslessness", passed=None),))).endswith(
        "(not checked: losslessness)"
    )
