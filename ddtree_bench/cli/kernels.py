"""`ddtree-bench kernels`: check every kernel on this machine's GPU, then time it against what is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command("kernels")
@click.option("--op", "ops", multiple=True, help="Operation to check and time; all of them if not given.")
@click.option("--case", "case_filter", default="", help="Only cases whose name contains this text.")
@click.option(
    "--results", default=Path("results"), type=click.Path(file_okay=False, path_type=Path), help="Folder for <machine>/kernels."
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object in the last line.")
def command(ops: tuple[str, ...], case_filter: str, results: Path, is_json: bool) -> None:
    """Check every operation on its cases, then time it; writes kernels.json and kernels.png; exit 1 if a check fails."""
    from ddtree_bench.kernels import bench

    has_gpu = bench.prepare()
    if not has_gpu:
        click.echo("no NVIDIA GPU: timing needs one; small cases are checked through Triton's interpreter, nothing is written")
    result = bench.run_bench(bench.find_benches(ops), case_filter=case_filter, report=_print_row)
    counts = bench.summary(result)
    click.echo(", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no case has such a name")
    written = _write(result.to_dict(), results) if has_gpu else {}
    for path in written.values():
        click.echo(f"written: {path}")
    if is_json:
        click.echo(json.dumps({"counts": counts, **written, **result.to_dict()}, ensure_ascii=False))
    if result.failures:
        raise SystemExit(1)


def _print_row(row: Any) -> None:
    name = f"{row.op:<16} {row.case:<42} {row.variant:<26}"
    if row.status != "ok":
        click.echo(f"{name} {row.status}: {row.reason}")
    elif row.median_us is None:
        click.echo(f"{name} right")
    else:
        spread = f"{row.median_us:10.2f} µs [{row.p20_us:.2f}, {row.p80_us:.2f}]"
        shares = f"{row.gb_s:7.0f} GB/s {row.copy_share:5.1%} of copy"
        if row.tflop_s:
            shares += f", {row.tflop_s:6.1f} TFLOP/s {row.matmul_share:5.1%} of matmul"
        ratio = "" if row.ratio is None else f"  {row.ratio:.2f}×"
        click.echo(f"{name} {spread} {shares}{ratio}{'  (events)' if row.timer == 'events' else ''}")


def _write(result: dict[str, Any], results: Path) -> dict[str, str]:
    from ddtree_bench.records import machine_name, provenance, write_json
    from ddtree_bench.report.plots import kernels, style

    folder = results / machine_name() / "kernels"
    written = {**result, "provenance": provenance()}
    write_json(folder / "kernels.json", written)
    style.render("Kernels against their floor", kernels.data(written), kernels.draw, folder / "kernels.png")
    return {"results": str(folder / "kernels.json"), "plot": str(folder / "kernels.png")}
