"""`ddtree-bench sweep`: search the tree settings; every trial launches a server. The same command again goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ddtree_bench.sweep.results import SweepResult


@click.command("sweep")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Override a value of the file.")
@click.option(
    "--results",
    "results_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default="results/<machine>/<study>",
    help="Folder of this study.",
)
@click.option("--executor", default="local", help="Where trials run: local, ray or ray://HOST:PORT.")
@click.option("--dry-run", is_flag=True, help="Tell what would run, and run nothing.")
@click.option("--reuse-server", is_flag=True, help="Change the tree of one running server instead of launching, where it can.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
def command(
    file: Path,
    overrides: tuple[str, ...],
    results_dir: Path | None,
    executor: str,
    dry_run: bool,
    reuse_server: bool,
    as_json: bool,
) -> None:
    """Search the tree settings of FILE (TOML); every trial launches a server. The same command again continues.

    Exit status: 0 a best setting was found, 1 none or an error, 130 and 143 interrupted.
    """
    import json

    from ddtree_bench.backends import get_backend
    from ddtree_bench.config import SweepSpec
    from ddtree_bench.records import machine_name
    from ddtree_bench.sweep.plan import make_plan
    from ddtree_bench.sweep.run import run_sweep
    from ddtree_bench.sweep.show import make_observer
    from ddtree_bench.trial import Interrupted

    spec = SweepSpec.from_toml(file, overrides)
    folder = results_dir or Path("results") / machine_name() / spec.study.name
    if dry_run:
        plan = make_plan(spec, folder, get_backend(spec.server.backend), reuse_server=reuse_server)
        click.echo(json.dumps(plan.to_dict()) if as_json else plan.text())
        return
    with make_observer() as observer:
        try:
            result = run_sweep(spec, folder, executor=executor, observer=observer, reuse_server=reuse_server)
        except Interrupted as interrupt:
            observer.note(f"interrupted by {interrupt}; completed trials are kept, the same command continues")
            raise SystemExit(interrupt.exit_status) from None
    _report(result)
    click.echo(json.dumps(result.to_dict()) if as_json else _text(result))
    if result.best is None:
        raise SystemExit(1)


def _report(result: SweepResult) -> None:
    """Draw the plots and the page."""
    from ddtree_bench.report.html import write_report

    page = write_report(result.results_dir)
    click.echo(f"report: {page}", err=True)


def _text(result: SweepResult) -> str:
    lines = ["", f"Pareto front ({len(result.front)} of {len(result.trials)} trials)"]
    lines += [f"  {_line(trial)}" for trial in result.front]
    failed = [trial for trial in result.trials if trial.failure is not None]
    lines += [f"  failed: trial {t.number} {t.label}: {t.failure.kind}" for t in failed if t.failure is not None]
    if result.best is None:
        return "\n".join([*lines, "", "no trial passed every gate and constraint: nothing can be called best"])
    lines += ["", "plain    " + _line(result.baseline), "linear   " + _line(result.best_linear, result.baseline)]
    lines += ["tree     " + _line(result.best_tree, result.baseline), "best     " + _line(result.best, result.baseline)]
    ratio = _times(result.best, result.baseline)
    if ratio is not None and ratio <= 1.0:
        lines += ["", "no setting is faster than plain decoding on this machine, model and load: serve with --mode plain"]
    unchecked = [f"{gate.name}: {gate.detail}" for gate in result.best.gates if gate.passed is None]
    lines += ["", *(f"gate of the best setting that could not be checked: {text}" for text in unchecked)] if unchecked else []
    ledger = result.ledger
    gpu = "" if ledger["gpu_hours"] is None else f", {ledger['gpu_hours']:.2f} GPU-hours"
    repeats = f"; {result.num_repeats} repeats were not launched" if result.num_repeats else ""
    lines += [
        "",
        f"{ledger['num_launches']} launches, {ledger['wall_s'] / 60:.1f} min{gpu}{repeats}",
        f"results: {result.results_dir}",
    ]
    lines += ["each setting was launched once: `ddtree-bench compare` tells whether a difference is more than noise"]
    return "\n".join([*lines, "", "serve the best setting of the search (best.sh):", f"  {result.command}"])


def _times(trial: Any, baseline: Any) -> float | None:
    """Return ms per token of the baseline over the trial's own; None where one is unknown."""
    known = [None if one is None else one.metrics.get("ms_per_token") for one in (baseline, trial)]
    return known[0] / known[1] if known[0] and known[1] else None


def _line(trial: Any, baseline: Any = None) -> str:
    if trial is None:
        return "none"
    rate, acceptance = trial.metrics.get("output_tok_s"), trial.metrics.get("acceptance_length")
    words = [f"{rate:8.1f} tok/s", "acceptance length  none" if acceptance is None else f"acceptance length {acceptance:5.2f}"]
    ratio = _times(trial, baseline)
    words += [f"{ratio:5.2f} x plain"] if ratio is not None else []
    return "  ".join([*words, trial.label])
