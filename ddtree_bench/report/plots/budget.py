"""Speed or acceptance against node budget: every tree setting, the best of each budget, and the baselines as levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.report.plots import style
from ddtree_bench.report.study import StudyResults, best_of


@dataclass(frozen=True, kw_only=True)
class BudgetData:
    """Points (node_budget, value, block_size) of the tree settings; `best` holds the highest value of each budget."""

    metric: str
    points: Sequence[tuple[int, float, int]]
    best: Sequence[tuple[int, float]]
    levels: Mapping[str, float]
    message: str | None


def data(study: StudyResults, metric: str) -> BudgetData:
    """Return what is drawn for `output_tok_s` or `acceptance_length`."""
    settings = study.settings
    points: list[tuple[int, float, int]] = []
    highest: dict[int, float] = {}
    for setting in settings:
        value, budget = getattr(setting, metric), setting.knobs.get("node_budget")
        if setting.mode != "tree" or value is None or budget is None:
            continue
        points.append((int(budget), float(value), int(setting.knobs.get("block_size") or 0)))
        highest[int(budget)] = max(float(value), highest.get(int(budget), float("-inf")))
    levels = {}
    for mode in ("plain", "linear"):
        found = best_of(settings, mode)
        value = None if found is None else getattr(found, metric)
        if value is not None and not (mode == "plain" and metric == "acceptance_length"):
            levels[mode] = float(value)
    message = None if points else f"No tree setting has a known {style.AXIS_NAMES[metric].split(' (')[0]} yet."
    return BudgetData(metric=metric, points=points, best=sorted(highest.items()), levels=levels, message=message)


def draw(data: BudgetData, axes: Any) -> None:
    """Draw points by block size over a logarithmic budget axis."""
    from matplotlib.ticker import FixedLocator, NullLocator

    blocks = sorted({block for _, _, block in data.points})
    for block, shade in zip(blocks, style.shades(len(blocks)), strict=True):
        own = [(x, y) for x, y, b in data.points if b == block]
        axes.scatter([x for x, _ in own], [y for _, y in own], s=40, color=shade, linewidths=0, zorder=3, label=f"block {block}")
    axes.plot([x for x, _ in data.best], [y for _, y in data.best], color=style.FRONT, linewidth=1.8, zorder=4)
    x_top, y_top = max(data.best, key=lambda point: point[1])
    axes.scatter([x_top], [y_top], s=190, facecolors="none", edgecolors=style.INK, linewidths=1.6, zorder=5)
    figure = f"{y_top:,.0f} tok/s" if data.metric == "output_tok_s" else f"{y_top:.2f}"
    axes.annotate(
        f"{figure} at {x_top} nodes", xy=(x_top, y_top), xytext=(0, 12), textcoords="offset points", ha="center", fontsize=9
    )
    for mode, value in data.levels.items():
        style.level(axes, value, "plain" if mode == "plain" else "best linear", style.COLOURS[mode])
    ys = [y for _, y, _ in data.points] + list(data.levels.values())
    room = (max(ys) - min(ys)) or max(ys) * 0.1
    axes.set_ylim(min(ys) - 0.1 * room, max(ys) + 0.2 * room)
    budgets = sorted({x for x, _, _ in data.points})
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(budgets) / 1.25, max(budgets) * 1.35)
    shown = _spread(budgets)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(x) for x in shown])
    axes.set_xlabel("node budget (draft nodes, root not counted)")
    if data.metric == "output_tok_s":
        axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.set_ylabel(style.AXIS_NAMES[data.metric].replace(" (", "\n("))
    if len(blocks) > 1:
        style.legend_above(axes)


def _spread(values: Sequence[int], ratio: float = 1.22) -> list[int]:
    """Return the values that fit as ticks: each at least `ratio` over the one before."""
    shown: list[int] = []
    for value in values:
        if not shown or value >= shown[-1] * ratio:
            shown.append(value)
    return shown
