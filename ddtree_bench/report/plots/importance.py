"""Which knob moved the first objective: PED-ANOVA over the trials that count (optuna, arXiv 2304.10255)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.config import SPACE_KEYS
from ddtree_bench.errors import MissingPackageError
from ddtree_bench.report.plots import style
from ddtree_bench.report.study import StudyResults, mode_of, searched_mode

MIN_TRIALS = 10


@dataclass(frozen=True, kw_only=True)
class ImportanceData:
    """Importance of each knob (shares that add up to 1), largest first."""

    objective: str
    shares: Sequence[tuple[str, float]]
    num_trials: int
    message: str | None


def data(study: StudyResults) -> ImportanceData:
    """Return the shares, or the sentence why there are none."""
    objective, searched = study.objectives[0], searched_mode(study.trials)
    rows = [
        (t.effective, float(t.metrics[objective]))
        for t in study.trials
        if t.counts and mode_of(t) == searched and t.metrics.get(objective) is not None
    ]
    knobs = [key for key in SPACE_KEYS if len({row.get(key) for row, _ in rows}) > 1]
    message = None
    if len(rows) < MIN_TRIALS:
        message = f"Too few trials: {len(rows)} count, {MIN_TRIALS} are needed to tell knobs apart."
    elif not knobs:
        message = "No knob took more than one value."
    elif len({value for _, value in rows}) == 1:
        message = "Every trial has the same value; no knob made a difference."
    shares = [] if message else _ped_anova(rows, knobs)
    if not message and not shares:
        message = "The trials do not tell the knobs apart."
    return ImportanceData(objective=objective, shares=shares, num_trials=len(rows), message=message)


def _ped_anova(rows: Sequence[tuple[Mapping[str, Any], float]], knobs: Sequence[str]) -> list[tuple[str, float]]:
    """Return the shares; a knob is seen as the rank of its value, so that a cap of none (the largest) has a place."""
    try:
        import optuna
    except ImportError as error:
        raise MissingPackageError("optuna", "dev", "parameter importance") from error
    from optuna.distributions import IntDistribution
    from optuna.importance import PedAnovaImportanceEvaluator

    values = {
        knob: sorted({row.get(knob) for row, _ in rows}, key=lambda v: float("inf") if v is None else float(v)) for knob in knobs
    }
    distributions = {knob: IntDistribution(0, len(values[knob]) - 1) for knob in knobs}
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize")
        for row, value in rows:
            params = {knob: values[knob].index(row.get(knob)) for knob in knobs}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=dict(distributions), value=value))
        found = optuna.importance.get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    finally:
        optuna.logging.set_verbosity(before)
    total = sum(found.values())
    return [(knob, share / total) for knob, share in found.items()] if total > 0 else []


def draw(data: ImportanceData, axes: Any) -> None:
    """Draw horizontal bars with their shares."""
    names = [name for name, _ in data.shares][::-1]
    shares = [share for _, share in data.shares][::-1]
    axes.barh(names, shares, color=style.TREE, height=0.62, zorder=3)
    for i, share in enumerate(shares):
        axes.annotate(f"{share:.0%}", xy=(share, i), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max(shares) * 1.12)
    axes.set_xlabel(f"share of what moved {data.objective} (over {data.num_trials} trials)")
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
