"""The first objective trial by trial and the best within the constraints until then; trials that do not count are ticks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.report.plots import style
from ddtree_bench.report.study import StudyResults, best_of, mode_of, searched_mode


@dataclass(frozen=True, kw_only=True)
class ProgressData:
    """`values` and `best` are (trial number, value); `failed` the numbers of trials that failed or failed a gate."""

    objective: str
    values: Sequence[tuple[int, float]]
    best: Sequence[tuple[int, float]]
    failed: Sequence[int]
    levels: Mapping[str, float]
    message: str | None


def data(study: StudyResults) -> ProgressData:
    """Return the history of the trials of the mode that was searched (both objectives are better when higher)."""
    objective, searched = study.objectives[0], searched_mode(study.trials)
    shown = [t for t in study.trials if t.counts and mode_of(t) == searched and t.metrics.get(objective) is not None]
    values = [(t.number, float(t.metrics[objective])) for t in shown]
    best: list[tuple[int, float]] = []
    top: float | None = None
    for trial, (number, value) in zip(shown, values, strict=True):
        if trial.is_feasible:
            top = value if top is None else max(top, value)
        if top is not None:
            best.append((number, top))
    settings = study.settings
    levels = {}
    for mode in ("plain", "linear") if searched == "tree" else ("plain",):
        found = best_of(settings, mode)
        level = None if found is None else getattr(found, objective)
        if level is not None and not (mode == "plain" and objective == "acceptance_length"):
            levels[mode] = float(level)
    message = None if values else f"No {searched} trial has been completed yet."
    failed = [t.number for t in study.trials if not t.counts]
    return ProgressData(objective=objective, values=values, best=best, failed=failed, levels=levels, message=message)


def draw(data: ProgressData, axes: Any) -> None:
    """Draw points, the staircase of the best, and ticks for failures."""
    from matplotlib.ticker import MaxNLocator

    axes.scatter([n for n, _ in data.values], [v for _, v in data.values], s=34, color=style.TREE, alpha=0.4, lw=0, label="trial")
    last = max([n for n, _ in data.values] + list(data.failed))
    steps = [*data.best, *((last, value) for _, value in data.best[-1:])]
    axes.step([n for n, _ in steps], [v for _, v in steps], where="post", color=style.FRONT, linewidth=2, label="best so far")
    for mode, value in data.levels.items():
        style.level(axes, value, "plain" if mode == "plain" else "best linear", style.COLOURS[mode])
    ys = [v for _, v in data.values] + list(data.levels.values())
    room = (max(ys) - min(ys)) or max(abs(max(ys)), 1.0) * 0.1
    axes.set_ylim(min(ys) - 0.14 * room, max(ys) + 0.12 * room)
    if data.failed:
        foot = [min(ys) - 0.09 * room] * len(data.failed)
        axes.scatter(data.failed, foot, marker="x", s=36, color=style.BAD, linewidths=1.6, label="failed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if data.objective == "output_tok_s":
        axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.set_xlim(min(n for n, _ in data.values) - 0.5, last + 0.5)
    axes.set_xlabel("trial")
    axes.set_ylabel(style.AXIS_NAMES[data.objective].replace(" (", "\n("))
    style.legend_above(axes)
