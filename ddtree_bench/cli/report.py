"""`ddtree-bench report RESULTS`: draw the plots and the page of a study."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("report")
@click.argument("results", type=click.Path(file_okay=False, path_type=Path), metavar="RESULTS")
@click.option("--json", "is_json", is_flag=True, help="Print the paths as one JSON object in the last line.")
def command(results: Path, is_json: bool) -> None:
    """Draw plots/*.png and report.html from the records of a study's results folder."""
    from ddtree_bench.report.html import headline, write_report
    from ddtree_bench.report.study import read_study

    page = write_report(results)
    answer = headline(read_study(results))
    click.echo(answer)
    click.echo(f"written: {page}")
    if is_json:
        plots = sorted(str(file) for file in (results / "plots").glob("*.png"))
        click.echo(json.dumps({"report": str(page), "plots": plots, "headline": answer}))
