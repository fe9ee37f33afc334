"""The plots of a report. Each file: `data(study) -> …` (plain data, tested) and `draw(data, axes)` (thin, matplotlib)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from ddtree_bench.report.study import StudyResults


@dataclass(frozen=True)
class Plot:
    """One plot of the report: its file name, its module, the argument its data function takes, and what it tells."""

    name: str
    module: str
    argument: str | None
    title: str
    caption: str


PLOTS = (
    Plot(
        "pareto",
        "pareto",
        None,
        "Acceptance against speed",
        "Every setting that failed no gate. The front holds the settings within the constraints that no other such setting beats "
        "in both; plain decoding and the best linear setting are marked.",
    ),
    Plot(
        "tok_s_by_budget",
        "budget",
        "output_tok_s",
        "Speed against node budget",
        "The line joins the fastest setting of each budget: it rises while more accepted tokens pay for the wider verify step, "
        "and falls after.",
    ),
    Plot(
        "acceptance_by_budget",
        "budget",
        "acceptance_length",
        "Acceptance against node budget",
        "The line joins the best acceptance of each budget. More nodes always accept at least as much; that alone is no speed.",
    ),
    Plot(
        "depth_survival",
        "depth_survival",
        None,
        "How deep drafts survive",
        "Share of verify steps that accepted at least so many draft tokens.",
    ),
    Plot(
        "importance",
        "importance",
        None,
        "Which knob matters",
        "PED-ANOVA importance of each searched knob for the study's first objective.",
    ),
    Plot("best_so_far", "progress", None, "Best so far", "The study's first objective, trial by trial, and the best until then."),
)


def write_plots(study: StudyResults, folder: Path) -> dict[str, bytes]:
    """Draw every plot into NAME.png; return the SVG of each name."""
    from ddtree_bench.report.plots import style

    written = {}
    for plot in PLOTS:
        module = importlib.import_module(f"ddtree_bench.report.plots.{plot.module}")
        data = module.data(study) if plot.argument is None else module.data(study, plot.argument)
        written[plot.name] = style.render(plot.title, data, module.draw, folder / f"{plot.name}.png")
    return written
