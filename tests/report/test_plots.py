"""The data behind each plot, on a full study and on the thin ones, and that every drawing draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from study_records import failed, full_trials, study_of, trial

from ddtree_bench.config import TreeSetting
from ddtree_bench.metrics.summary import summarise, trial_metrics
from ddtree_bench.records import GateResult, RequestRecord
from ddtree_bench.report.plots import PLOTS, budget, comparison, depth_survival, importance, pareto, progress, style, write_plots
from ddtree_bench.report.study import StudyResults

GATED = (GateResult(name="losslessness", passed=False, detail="2 of 3 differ"),)


def test_front_is_what_no_other_setting_beats(full_study: StudyResults) -> None:
    data = pareto.data(full_study)
    assert data.front
    for point in data.front:
        better = [p for p in data.points if p.acceptance_length > point.acceptance_length and p.output_tok_s > point.output_tok_s]
        assert better == []
    lengths = [point.acceptance_length for point in data.front]
    rates = [point.output_tok_s for point in data.front]
    assert lengths == sorted(lengths)
    assert rates == sorted(rates, reverse=True)


def test_baselines_are_marked_and_failures_counted(full_study: StudyResults) -> None:
    data = pareto.data(full_study)
    assert data.baselines["plain"].acceptance_length == 1.0
    assert data.baselines["linear"].output_tok_s == 1990
    assert data.num_left_out == 2


def test_failed_gate_is_left_out_of_the_front() -> None:
    fast = trial(0, TreeSetting(node_budget=31), 900.0, 9.0, gates=GATED)
    data = pareto.data(study_of([fast, trial(1, TreeSetting(node_budget=7), 100.0, 2.0)]))
    assert [point.output_tok_s for point in data.front] == [100.0]
    assert data.num_left_out == 1


def test_front_is_within_the_constraints() -> None:
    over = trial(0, TreeSetting(node_budget=31), 900.0, 9.0, constraints={"launch_ok": 0.0, "ttft_p50_ms": 0.2})
    data = pareto.data(study_of([over, trial(1, TreeSetting(node_budget=7), 100.0, 2.0)]))
    assert [point.output_tok_s for point in data.front] == [100.0]
    assert len(data.points) == 2


def test_linear_study_has_a_history_and_knobs() -> None:
    study = study_of([trial(i, TreeSetting(mode="linear", depth=2 + i), 100.0 + i, 2.0) for i in range(10)])
    history = progress.data(study)
    assert [value for _, value in history.best] == [100.0 + i for i in range(10)]
    assert list(history.levels) == []
    assert importance.data(study).num_trials == 10


def test_best_so_far_meets_the_constraints() -> None:
    limits = ({"a": -0.1}, {"a": 0.2}, {"a": 0.0})
    trials = [trial(i, TreeSetting(node_budget=3 + i), 100.0 * (i + 1), 2.0, constraints=limit) for i, limit in enumerate(limits)]
    assert [value for _, value in progress.data(study_of(trials)).best] == [100.0, 100.0, 300.0]
    assert progress.data(study_of(trials[1:2])).best == []


def test_ties_stay_on_the_front_together() -> None:
    data = pareto.data(study_of([trial(i, TreeSetting(node_budget=3 + i), 100.0, 2.0) for i in range(3)]))
    assert len(data.front) == 3


def test_replicates_are_one_setting_with_its_median() -> None:
    data = pareto.data(study_of([trial(i, TreeSetting(), rate, 2.0) for i, rate in enumerate((100.0, 130.0, 104.0))]))
    assert [point.output_tok_s for point in data.points] == [104.0]


@pytest.mark.parametrize("metric", ["output_tok_s", "acceptance_length"])
def test_best_of_each_budget(full_study: StudyResults, metric: str) -> None:
    data = budget.data(full_study, metric)
    for nodes, value in data.best:
        assert value == max(y for x, y, _ in data.points if x == nodes)
    assert ("plain" in data.levels) == (metric == "output_tok_s")
    assert "linear" in data.levels


def test_survival_curves_are_the_settings_that_matter(full_study: StudyResults) -> None:
    data = depth_survival.data(full_study)
    assert [curve.name for curve in data.curves] == ["fastest tree", "best linear", "longest accepting"]
    fastest = next(t for t in full_study.trials if t.label == data.curves[0].label)
    assert list(data.curves[0].shares) == fastest.metrics["depth_survival"]


def test_survival_starts_at_depth_one_and_adds_up_to_the_measured_acceptance_length() -> None:
    """From request records to the curve: steps that accepted 0, 1, 1 and 3 tokens."""
    walked = RequestRecord(
        request_id="r",
        prompt_id="p",
        sent_s=0.0,
        done_s=1.0,
        output_tokens=10,
        num_verify_steps=4,
        num_accepted=5,
        accepted_histogram=[1, 2, 0, 1],
    )
    measured = trial(0, TreeSetting(node_budget=7), 10.0, 2.25, metrics=trial_metrics(summarise([walked])))
    (curve,) = depth_survival.data(study_of([measured])).curves
    assert list(curve.shares) == [0.75, 0.25, 0.25]
    assert 1 + sum(curve.shares) == measured.metrics["acceptance_length"]


def test_importance_shares_add_up(full_study: StudyResults) -> None:
    data = importance.data(full_study)
    assert data.message is None
    assert sum(share for _, share in data.shares) == pytest.approx(1.0)
    assert "draft_temperature" not in dict(data.shares)


def test_too_few_trials_have_no_importance() -> None:
    data = importance.data(study_of(full_trials()[:8]))
    assert data.shares == []
    assert "Too few trials" in (data.message or "")


def test_best_so_far_never_falls(full_study: StudyResults) -> None:
    data = progress.data(full_study)
    values = [value for _, value in data.best]
    assert values == sorted(values)
    assert len(data.failed) == 2


def test_single_objective_is_the_one_that_is_followed() -> None:
    trials = [trial(i, TreeSetting(node_budget=3 + i), 100.0 - i, 2.0 + i) for i in range(3)]
    data = progress.data(study_of(trials, objectives=["acceptance_length"]))
    assert [value for _, value in data.best] == [2.0, 3.0, 4.0]


def test_thin_studies_draw_or_say_why_not(thin_study: StudyResults, tmp_path: Path) -> None:
    written = write_plots(thin_study, tmp_path)
    assert set(written) == {plot.name for plot in PLOTS}
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in written)


def test_nothing_to_draw_is_a_sentence() -> None:
    empty = study_of([failed(0, TreeSetting())])
    messages = [pareto.data(empty).message, budget.data(empty, "output_tok_s").message, progress.data(empty).message]
    messages += [depth_survival.data(empty).message, importance.data(empty).message]
    assert all(message and message.endswith(".") for message in messages)


def pair(verdict: str, *, classes: bool = True) -> dict:
    ratio = {"value": 0.8, "low": 0.7, "high": 0.9, "num_prompts": 4, "num_blocks": 2}
    return {
        "arm": "tree",
        "baseline": "linear",
        "verdict": verdict,
        "ratio": ratio,
        "class_ratios": {"code": ratio, "prose": ratio | {"low": 0.75, "high": 1.1}} if classes else {"code": ratio},
        "sentence": "verdict withheld: drift" if verdict == "withheld" else "tree is faster",
    }


def test_comparison_rows_hold_classes_below_their_pair() -> None:
    data = comparison.data({"pairs": [pair("faster"), pair("faster", classes=False)]})
    assert [(row.name, row.verdict, row.is_class) for row in data.rows] == [
        ("tree / linear", "faster", False),
        ("code", "faster", True),
        ("prose", "no difference shown", True),
        ("tree / linear", "faster", False),
    ]
    assert style.render("t", data, comparison.draw).startswith(b"<?xml")


def test_withheld_comparison_shows_no_ratio() -> None:
    data = comparison.data({"pairs": [pair("withheld")]})
    assert data.rows == []
    assert data.message == "Verdict withheld: drift"
