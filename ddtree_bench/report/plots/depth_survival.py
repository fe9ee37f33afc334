"""Share of verify steps that accepted at least d draft tokens: fastest tree, best linear, longest accepting tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.report.plots import style
from ddtree_bench.report.study import Setting, StudyResults, best_of


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One setting; `shares[d - 1]` is the share of steps that accepted at least d draft tokens."""

    name: str
    label: str
    mode: str
    shares: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class SurvivalData:
    """The curves, fastest tree first."""

    curves: Sequence[Curve]
    message: str | None


def data(study: StudyResults) -> SurvivalData:
    """Return the curves of the settings whose depth survival is known."""
    settings = [s for s in study.settings if s.metrics.get("depth_survival")]
    wanted: list[tuple[str, Setting | None]] = [
        ("fastest tree", best_of(settings, "tree")),
        ("best linear", best_of(settings, "linear")),
    ]
    longest = max((s for s in settings if s.mode == "tree"), key=lambda s: s.acceptance_length or 0.0, default=None)
    if longest is not None and longest is not wanted[0][1]:
        wanted.append(("longest accepting", longest))
    curves = [
        Curve(name=name, label=s.label, mode=s.mode, shares=[float(x) for x in s.metrics["depth_survival"]])
        for name, s in wanted
        if s is not None
    ]
    message = None if curves else "No server told how many tokens each verify step accepted."
    return SurvivalData(curves=curves, message=message)


def draw(data: SurvivalData, axes: Any) -> None:
    """Draw the curves as percent over depth."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for curve in data.curves:
        is_extra = curve.name == "longest accepting"
        axes.plot(
            range(1, len(curve.shares) + 1),
            curve.shares,
            color=style.COLOURS[curve.mode],
            alpha=0.45 if is_extra else 1.0,
            linestyle="--" if is_extra else "-",
            linewidth=2,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label=f"{curve.name}: {curve.label}",
        )
    deepest = max(len(curve.shares) for curve in data.curves)
    axes.set_xlim(0.5, deepest + 0.5)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("draft tokens accepted, at least")
    axes.set_ylabel("share of verify steps")
    axes.legend(loc="upper right")
