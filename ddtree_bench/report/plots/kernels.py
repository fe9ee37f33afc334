"""The time of every kernel on every case, beside its floor and its alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.report.plots import style


@dataclass(frozen=True, kw_only=True)
class Line:
    """One case: microseconds of the kernel in use, of the floor, and of each alternative by name."""

    name: str
    median_us: float
    floor_us: float
    others: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class KernelsData:
    """Lines from top to bottom; a message where nothing was timed."""

    lines: Sequence[Line]
    message: str | None


def data(result: Mapping[str, Any]) -> KernelsData:
    """Return one line for each case of a kernels.json whose kernel in use was timed."""
    cases: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if row["median_us"] is not None:
            cases.setdefault((row["op"], row["case"]), []).append(row)
    lines = []
    for (op, case), rows in cases.items():
        ours = [row for row in rows if row["is_ours"]]
        if ours:
            others = {row["variant"]: row["median_us"] for row in rows if not row["is_ours"]}
            lines.append(Line(name=f"{op}  {case}", median_us=ours[0]["median_us"], floor_us=ours[0]["floor_us"], others=others))
    return KernelsData(lines=lines, message=None if lines else "Nothing was timed: timing needs an NVIDIA GPU.")


def draw(data: KernelsData, axes: Any) -> None:
    """Draw one row a case, time on a logarithmic axis."""
    axes.figure.set_size_inches(9.5, 1.4 + 0.24 * len(data.lines))
    rows = range(len(data.lines))
    others = [(y, us) for y, line in enumerate(data.lines) for us in line.others.values()]
    if others:
        axes.scatter([us for _, us in others], [y for y, _ in others], color=style.LINEAR, s=26, marker="x", label="alternatives")
    axes.scatter([line.floor_us for line in data.lines], rows, color=style.MUTED, s=70, marker="|", label="floor")
    axes.scatter([line.median_us for line in data.lines], rows, color=style.TREE, s=30, zorder=3, label="kernel in use")
    axes.set_xscale("log")
    axes.set_xlim(left=0.3)  # a floor below that says only that launches bind
    axes.set_yticks(rows, [line.name for line in data.lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("median µs of one call (floor: bytes over copy bandwidth, or operations over matmul rate)")
    style.legend_above(axes)
