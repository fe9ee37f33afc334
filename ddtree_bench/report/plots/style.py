"""How every plot looks: colours by decoding mode, one size, quiet axes; matplotlib without a display and without global state."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

TREE, LINEAR, PLAIN = "#0f766e", "#d97706", "#64748b"
FRONT, MUTED, INK, GRID, BAD = "#134e4a", "#94a3b8", "#0f172a", "#e2e8f0", "#b91c1c"
COLOURS = {"tree": TREE, "linear": LINEAR, "plain": PLAIN}
SEQUENCE = ("#99d8cf", "#4fb3a6", "#0f766e", "#134e4a", "#0b2f2d")
SIZE_IN = (7.4, 4.5)
AXIS_NAMES = {
    "output_tok_s": "output tokens per second",
    "acceptance_length": "acceptance length (tokens per verify step, bonus included)",
    "ms_per_token": "ms per token",
}
SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "ddtree-bench",
}


def render(title: str, data: Any, draw: Callable[[Any, Any], None], png: Path | None = None) -> bytes:
    """Draw onto one pair of axes; return the drawing as SVG and write it as PNG where a path is given.

    A `data.message` that is not None is written instead of a drawing.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    svg = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE_IN, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
        if data.message is not None:
            write_message(axes, data.message)
        else:
            draw(data, axes)
        if png is not None:
            png.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(png, dpi=160)
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def write_message(axes: Any, message: str) -> None:
    """Write a plain sentence where there is nothing to draw."""
    import textwrap

    axes.set_axis_off()
    axes.text(
        0.5, 0.5, textwrap.fill(message, 56), ha="center", va="center", transform=axes.transAxes, color="#475569", fontsize=11
    )


def level(axes: Any, value: float, text: str, colour: str) -> None:
    """Draw a horizontal baseline with its name at the right end."""
    axes.axhline(value, color=colour, linewidth=1.4, linestyle=(0, (5, 3)), zorder=2)
    axes.annotate(
        text,
        xy=(1.0, value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=colour,
        fontsize=9,
        fontweight="bold",
    )


def pad_limits(axes: Any, xs: list[float], ys: list[float]) -> None:
    """Leave room round the points; a single point or a tie gets a range as well."""
    for values, setter in ((xs, axes.set_xlim), (ys, axes.set_ylim)):
        low, high = min(values), max(values)
        room = (high - low) * 0.12 or max(abs(high), 1.0) * 0.1
        setter(low - room, high + room)


def legend_above(axes: Any) -> None:
    """Put the legend right above the axes, beside the title, where it hides no point."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.005), ncols=4, borderaxespad=0.2, columnspacing=1.2, handletextpad=0.4)


def shades(count: int) -> list[str]:
    """Return colours for an ordered knob, light to dark, spread over the scale."""
    if count == 1:
        return [TREE]
    last = len(SEQUENCE) - 1
    return [SEQUENCE[round(i * min(last, max(2, count - 1)) / (count - 1))] for i in range(count)]
