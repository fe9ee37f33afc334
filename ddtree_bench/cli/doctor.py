"""`ddtree-bench doctor`: what this machine has and what would stop a run; each line says what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from ddtree_bench.config import DEVICES


@click.command("doctor")
@click.option("--model", default=None, help="Target to check: a checkpoint folder or a bundled name.")
@click.option("--drafter", default=None, help="Drafter to check, with the target as a pair.")
@click.option("--device", default=None, type=click.Choice(DEVICES), help="Device that runs are meant for.")
@click.option("--tensor-parallel", default=1, type=click.IntRange(min=1), help="Ranks that the heads must divide over.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object in the last line.")
def command(model: str | None, drafter: str | None, device: str | None, tensor_parallel: int, is_json: bool) -> None:
    """Look at system, packages, GPUs, limits, leftovers and checkpoints; exit 1 if something would stop a run."""
    import dataclasses

    from ddtree_bench.cli import doctor_checks as checks
    from ddtree_bench.cli import doctor_models as models

    lines = [*checks.system(), *checks.memory(), *checks.limits(), *checks.packages(), *checks.gpus(device), *checks.leftovers()]
    lines += models.check(model, drafter, tensor_parallel)
    stops = sum(line.status == checks.STOP for line in lines)
    warnings = sum(line.status == checks.WARN for line in lines)
    _print(lines)
    verdict = f"{stops} would stop a run" if stops else "nothing would stop a run"
    click.echo(f"{verdict}; {warnings} warnings")
    if is_json:
        rows = [dataclasses.asdict(line) for line in lines]
        click.echo(json.dumps({"stops": stops, "warnings": warnings, "lines": rows}, ensure_ascii=False))
    if stops:
        raise SystemExit(1)


def _print(lines: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "stop": "bold red"}
    table = Table(show_header=False, show_edge=False, box=None, pad_edge=False)
    for width in (4, None, None):
        table.add_column(min_width=width, no_wrap=width is not None, overflow="fold")
    for line in lines:
        found = Text(line.found)
        if line.do:
            found.append(f"\n→ {line.do}", style=colours[line.status])
        table.add_row(Text(line.status, style=colours[line.status]), Text(line.name, style="bold"), found)
    Console().print(table)
