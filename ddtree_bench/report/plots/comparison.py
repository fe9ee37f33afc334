"""The ratios of a comparison with their intervals: each pair over all prompts, then by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.report.plots import style

_COLOURS = {"faster": style.TREE, "slower": style.BAD}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the plot: what is compared, the ratio of ms per token and its interval, and whether it is a class alone."""

    name: str
    value: float
    low: float
    high: float
    verdict: str
    is_class: bool


@dataclass(frozen=True, kw_only=True)
class ComparisonData:
    """Rows from top to bottom and the verdict of the pair that was asked for."""

    rows: Sequence[Row]
    sentence: str
    message: str | None


def data(comparison: Mapping[str, Any]) -> ComparisonData:
    """Return the rows of a comparison.json; a pair whose verdict is withheld shows no ratio."""
    rows: list[Row] = []
    pairs = comparison["pairs"]
    for pair in pairs:
        if pair["ratio"] is None or pair["verdict"] == "withheld":
            continue
        rows.append(_row(f"{pair['arm']} / {pair['baseline']}", pair["ratio"], pair["verdict"], is_class=False))
        if len(pair["class_ratios"]) > 1:
            rows += [_row(name, ratio, None, is_class=True) for name, ratio in pair["class_ratios"].items()]
    sentence = str(pairs[0]["sentence"])
    return ComparisonData(rows=rows, sentence=sentence, message=None if rows else sentence[0].upper() + sentence[1:])


def _row(name: str, ratio: Mapping[str, float], verdict: str | None, *, is_class: bool) -> Row:
    value, low, high = ratio["value"], ratio["low"], ratio["high"]
    shown = verdict or ("faster" if high < 1 else "slower" if low > 1 else "no difference shown")
    return Row(name=name, value=value, low=low, high=high, verdict=shown, is_class=is_class)


def draw(data: ComparisonData, axes: Any) -> None:
    """Draw one interval a row with the line of no difference."""
    axes.axvline(1.0, color=style.MUTED, linewidth=1.2, zorder=1)
    for y, row in enumerate(reversed(data.rows)):
        colour = _COLOURS.get(row.verdict, style.PLAIN)
        axes.plot(
            [row.low, row.high], [y, y], color=colour, linewidth=2 if row.is_class else 3.5, alpha=0.6, solid_capstyle="round"
        )
        axes.plot([row.value], [y], marker="o", color=colour, markersize=5 if row.is_class else 8, markeredgecolor="white")
        axes.annotate(
            f"{row.value:.3f}",
            xy=(row.value, y),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8 if row.is_class else 9,
            color=colour,
        )
    names = [("   " if row.is_class else "") + row.name for row in reversed(data.rows)]
    axes.set_yticks(range(len(names)), names)
    for label, row in zip(axes.get_yticklabels(), reversed(data.rows), strict=True):
        label.set_fontweight("normal" if row.is_class else "bold")
        label.set_fontsize(9 if row.is_class else 10)
    axes.set_ylim(-0.6, len(names) - 0.2)
    low, high = min(1.0, *(row.low for row in data.rows)), max(1.0, *(row.high for row in data.rows))
    room = (high - low) * 0.08 or 0.05
    axes.set_xlim(low - room, high + room)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ratio of ms per token (left of 1: faster), 95 % interval over prompts and blocks")
