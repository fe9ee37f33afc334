"""The page of a study: one file without anything from outside, drawn from tables and plots by a template."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_bench import __version__
from ddtree_bench.records import write_text
from ddtree_bench.report import tables
from ddtree_bench.report.plots import PLOTS, comparison, style, write_plots
from ddtree_bench.report.study import StudyResults, best_of, read_study

TEMPLATE = "report.html.j2"


def write_report(results_dir: Path) -> Path:
    """Write plots/*.png and report.html into a study's results folder; return the page.

    Raises:
        FileNotFoundError: no such folder, or nothing of a study in it.
    """
    folder = Path(results_dir)
    study = read_study(folder)
    plots = write_plots(study, folder / "plots")
    page = folder / "report.html"
    write_text(page, render(study, {name: _svg_uri(svg) for name, svg in plots.items()}))
    return page


def render(study: StudyResults, images: Mapping[str, str]) -> str:
    """Return the page; `images` are data URIs by the plot's name."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ddtree_bench.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["figure"] = tables.figure
    return environment.get_template(TEMPLATE).render(
        study=study,
        version=__version__,
        rows=tables.setting_rows(study),
        failures=tables.failure_rows(study),
        gates=tables.gate_rows(study),
        provenance=tables.provenance_rows(study),
        command=tables.serving_command(study),
        headline=headline(study),
        cards=cards(study),
        plots=[{**dataclasses.asdict(plot), "image": images[plot.name]} for plot in PLOTS if plot.name in images],
        comparisons=[_comparison(one) for one in study.comparisons],
    )


def headline(study: StudyResults) -> str:
    """Return the study's answer in one sentence."""
    settings = study.settings
    tree, linear = best_of(settings, "tree"), best_of(settings, "linear")
    winner = best_of(settings)
    if winner is None:
        return "No setting has a result that counts yet."
    text = f"Fastest: {winner.label} at {winner.ms_per_token:.3g} ms per token."
    if not winner.is_within_constraints:
        text = f"No setting meets the constraints. Without them the f{text[1:]}"
    if tree is not None and linear is not None and winner.mode == "linear":
        text += " No tree setting of this study was faster than linear drafting."
    if winner.mode == "plain" and (tree is not None or linear is not None):
        text += " Speculation did not pay in this study."
    return text


def cards(study: StudyResults) -> list[dict[str, str]]:
    """Return the figures at the head of the page: the best of each mode."""
    settings = study.settings
    names = {"tree": "Best tree", "linear": "Best linear", "plain": "Plain decoding"}
    found = [(mode, best_of(settings, mode)) for mode in names]
    return [
        {
            "mode": mode,
            "name": names[mode],
            "value": tables.figure(s.output_tok_s, 0),
            "unit": "tok/s",
            "detail": f"{tables.figure(s.ms_per_token, 3)} ms per token"
            + (f" · acceptance length {s.acceptance_length:.2f}" if s.acceptance_length is not None and mode != "plain" else ""),
            "label": s.label + ("" if s.is_within_constraints else " (over a constraint)"),
        }
        for mode, s in found
        if s is not None
    ]


def _comparison(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of one comparison.json."""
    main = result["pairs"][0]
    svg = style.render("Ratio of ms per token", comparison.data(result), comparison.draw)
    arms = {arm["name"]: arm for arm in result["arms"]}
    return {
        "title": f"{main['baseline']} vs {main['arm']}",
        "sentence": main["sentence"],
        "image": _svg_uri(svg),
        "arms": [arms[name] for name in result["ranking"]],
        "pairs": result["pairs"],
        "notes": result["notes"],
    }


def _svg_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
