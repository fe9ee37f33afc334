"""`ddtree-bench compare A [vs] B`: interleaved blocks of the same prompts, a ratio with its interval, a verdict in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

OVERRIDABLE = ("server", "load", "gates")


@click.command("compare")
@click.argument("arms", nargs=-1, required=True, metavar="A [vs] B")
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), help="Sweep file or best.toml; default: the newest sweep."
)
@click.option("--results", default=Path("results"), type=click.Path(file_okay=False, path_type=Path), help="Results folder.")
@click.option(
    "--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Override a key of [server], [load] or [gates]."
)
@click.option("--blocks", default=4, type=click.IntRange(min=1), help="Interleaved blocks.")
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Seed of the blocks' order and of the interval.")
@click.option(
    "--keep-servers/--restart-servers",
    "keep_up",
    default=None,
    help="Keep all servers up and load one at a time, or start one for each block; default: keep on cpu, restart on cuda.",
)
@click.option("--json", "is_json", is_flag=True, help="Print the result as one JSON object in the last line.")
def command(
    arms: Sequence[str],
    config: Path | None,
    results: Path,
    overrides: Sequence[str],
    blocks: int,
    seed: int,
    keep_up: bool | None,
    is_json: bool,
) -> None:
    """Compare two arms; A and B are plain, linear, tree, a TOML file (e.g. best.toml) or a URL. The word vs may be left out."""
    from rich.console import Console

    from ddtree_bench.backends.leases import default_lease_dir, sweep_leases
    from ddtree_bench.compare.arms import arms_of, read_context
    from ddtree_bench.compare.output import folder_name, result_dict, write_comparison
    from ddtree_bench.compare.runner import run_comparison
    from ddtree_bench.records import machine_name
    from ddtree_bench.sweep.lock import results_lock
    from ddtree_bench.trial.interrupt import Interrupted, interruptible

    first, second = _two(arms)
    context = read_context(config, results)
    spec = _with_overrides(context.spec, overrides)
    context = _replace(context, spec=spec)
    specs, plain = arms_of(first, second, context)
    parent = context.study_dir or results / machine_name()
    folder = parent / folder_name(specs[0].name, specs[1].name)
    folder.mkdir(parents=True, exist_ok=True)
    progress = Console(stderr=True)
    progress.print(f"comparing {specs[0].name} ({specs[0].label}) with {specs[1].name} ({specs[1].label})", markup=False)
    progress.print(f"settings from: {context.source}", markup=False)
    for line in sweep_leases(default_lease_dir()):
        progress.print(line, markup=False)
    keep = spec.server.device == "cpu" if keep_up is None else keep_up
    try:
        with results_lock(folder), interruptible(), progress.status("starting") as status:
            outcome = run_comparison(
                specs, plain, spec, folder, num_blocks=blocks, seed=seed, keep_up=keep, on_stage=lambda text: status.update(text)
            )
    except Interrupted as interrupt:
        click.echo(f"interrupted; the records of finished blocks are in {folder}", err=True)
        raise SystemExit(interrupt.exit_status) from None
    result = json.loads(json.dumps(result_dict(outcome, context.source)))
    write_comparison(folder, result)
    _print(result, folder)
    if is_json:
        click.echo(json.dumps({**result, "folder": str(folder)}, ensure_ascii=False))


def _two(arms: Sequence[str]) -> tuple[str, str]:
    names = list(arms)
    if len(names) == 3 and names[1] in ("vs", "vs."):
        del names[1]
    if len(names) != 2:
        raise click.UsageError(f"compare needs two arms, as in `compare linear vs tree`; given {' '.join(arms)!r}")
    return names[0], names[1]


def _replace(value: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(value, **changes)


def _with_overrides(spec: Any, overrides: Sequence[str]) -> Any:
    from ddtree_bench.config import SweepSpec, apply_override

    if not overrides:
        return spec
    tables = spec.to_dict()
    for override in overrides:
        table, dot, _ = override.partition("=")[0].strip().partition(".")
        if dot and table not in OVERRIDABLE:
            raise click.BadParameter(
                f"must name a key of [server], [load] or [gates], what a comparison reads; given {override!r}", param_hint="--set"
            )
        apply_override(tables, override)
    return SweepSpec.from_dict(tables)


def _print(result: Mapping[str, Any], folder: Path) -> None:
    from rich.console import Console

    from ddtree_bench.compare.output import ARM_COLUMNS, PAIR_COLUMNS, arm_rows, pair_rows, remarks

    console = Console()
    console.print(_table(ARM_COLUMNS, arm_rows(result), right={"ms/token", "tok/s", "acceptance length"}))
    console.print()
    console.print(_table(PAIR_COLUMNS, pair_rows(result), right={"speedup"}))
    console.print()
    for text in remarks(result):
        console.print(f"- {text}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {folder}", highlight=False, markup=False, soft_wrap=True)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: set[str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {"faster": "green", "slower": "red", "withheld": "yellow", "confounded": "yellow"}
    table = Table(show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row[:-1], Text(row[-1], style=styles.get(row[-1].split(" (")[0], "")))
    return table
