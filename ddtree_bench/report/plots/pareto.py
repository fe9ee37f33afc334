"""Acceptance length against tok/s: the settings, the Pareto front, and the plain and linear baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.report.plots import style
from ddtree_bench.report.study import Setting, StudyResults, best_of


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting in the plane; plain decoding stands at an acceptance length of 1."""

    label: str
    mode: str
    acceptance_length: float
    output_tok_s: float
    is_front: bool
    is_best: bool
    verify_width: int | None = None


@dataclass(frozen=True, kw_only=True)
class ParetoData:
    """The points, the front from left to right, the baselines by name, and how many trials are left out."""

    points: Sequence[Point]
    front: Sequence[Point]
    baselines: dict[str, Point]
    num_left_out: int
    message: str | None


def data(study: StudyResults) -> ParetoData:
    """Return what is drawn; trials that failed or failed a gate are left out and counted."""
    settings = study.settings
    left_out = sum(not trial.counts for trial in study.trials)
    placed = [(s, x, s.output_tok_s) for s in settings if (x := _acceptance(s)) is not None and s.output_tok_s is not None]
    allowed = [(x, y) for s, x, y in placed if s.is_within_constraints]
    best = {mode: best_of(settings, mode) for mode in ("plain", "linear", "tree")}
    points = [
        Point(
            label=s.label,
            mode=s.mode,
            acceptance_length=x,
            output_tok_s=y,
            is_front=s.is_within_constraints and not any(_beats(other, (x, y)) for other in allowed),
            is_best=s is best[s.mode],
            verify_width=(s.knobs.get("node_budget") or 0) + 1 if s.mode == "tree" else None,
        )
        for s, x, y in placed
    ]
    front = sorted((p for p in points if p.is_front), key=lambda p: (p.acceptance_length, -p.output_tok_s))
    message = None if points else "No trial has both a speed and an acceptance length and passed its gates."
    baselines = {p.mode: p for p in points if p.is_best and p.mode != "tree"}
    return ParetoData(points=points, front=front, baselines=baselines, num_left_out=left_out, message=message)


def _acceptance(setting: Setting) -> float | None:
    return 1.0 if setting.mode == "plain" else setting.acceptance_length


def _beats(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether `first` is at least as good in both and better in one; ties beat nobody."""
    return first[0] >= second[0] and first[1] >= second[1] and first != second


def draw(data: ParetoData, axes: Any) -> None:
    """Draw the plane."""
    rest = [p for p in data.points if not p.is_front and p.mode == "tree"]
    if rest:
        xs, ys = [p.acceptance_length for p in rest], [p.output_tok_s for p in rest]
        axes.scatter(xs, ys, s=34, color=style.TREE, alpha=0.35, linewidths=0, label="tree", zorder=3)
    chains = [p for p in data.points if p.mode == "linear" and not p.is_best]
    if chains:
        xs, ys = [p.acceptance_length for p in chains], [p.output_tok_s for p in chains]
        axes.scatter(xs, ys, s=34, color=style.LINEAR, alpha=0.4, linewidths=0, zorder=3)
    axes.plot(
        [p.acceptance_length for p in data.front],
        [p.output_tok_s for p in data.front],
        color=style.FRONT,
        linewidth=1.8,
        marker="o",
        markersize=7,
        markeredgecolor="white",
        label="Pareto front",
        zorder=4,
    )
    for mode, point in data.baselines.items():
        axes.scatter(
            [point.acceptance_length],
            [point.output_tok_s],
            s=110,
            marker="D" if mode == "linear" else "s",
            color=style.COLOURS[mode],
            edgecolors="white",
            linewidths=1.2,
            label="plain decoding" if mode == "plain" else "best linear",
            zorder=5,
        )
    best = next((p for p in data.points if p.is_best and p.mode == "tree"), None)
    if best is not None:
        axes.scatter(
            [best.acceptance_length], [best.output_tok_s], s=190, facecolors="none", edgecolors=style.INK, lw=1.6, zorder=6
        )
        axes.annotate(
            f"fastest: {best.label}\n{best.output_tok_s:,.0f} tok/s",
            xy=(best.acceptance_length, best.output_tok_s),
            xytext=(0, 14),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=style.INK,
            zorder=7,
        )
    xs, ys = [p.acceptance_length for p in data.points], [p.output_tok_s for p in data.points]
    style.pad_limits(axes, xs, [*ys, max(ys) + 0.08 * (max(ys) - min(ys))])
    axes.set_xlabel(style.AXIS_NAMES["acceptance_length"])
    axes.set_ylabel(style.AXIS_NAMES["output_tok_s"])
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.legend(loc="best")
    if data.num_left_out:
        axes.set_title(f"{data.num_left_out} failed trials left out", loc="right", fontsize=9, color=style.PLAIN)
