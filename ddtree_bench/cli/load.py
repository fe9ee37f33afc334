"""`ddtree-bench load`: send a load to a server, record every request, print what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddtree_bench.config import ENDPOINTS, LoadSpec

if TYPE_CHECKING:
    from ddtree_bench.load.runner import LoadResult

_DEFAULTS = LoadSpec()


@click.command("load")
@click.option("--base-url", required=True, help="The server's URL, with or without /v1.")
@click.option("--endpoint", default=_DEFAULTS.endpoint, type=click.Choice(ENDPOINTS), help="What to call.")
@click.option("--model", default=None, help="Name to send; default: the first of /v1/models.")
@click.option("--dataset-name", default=None, help="bundled, or the kind of the file; default: bundled, jsonl with a path.")
@click.option("--dataset-path", default=None, type=click.Path(dir_okay=False), help="Prompts as JSONL (or a ShareGPT array).")
@click.option("--num-prompts", default=_DEFAULTS.num_prompts, help="Measured requests.")
@click.option("--max-concurrency", default=None, type=int, help="Most requests in flight; alone: a closed loop (default 1).")
@click.option("--request-rate", default=None, type=float, help="Open loop: requests a second (inf: all at once).")
@click.option("--burstiness", default=_DEFAULTS.burstiness, help="Shape of the gaps: 1 Poisson, inf constant, below 1 bursty.")
@click.option("--temperature", default=_DEFAULTS.temperature, help="Sampling temperature; 0 is greedy.")
@click.option("--max-tokens", default=_DEFAULTS.max_tokens, help="Most output tokens; a row's own output_tokens wins.")
@click.option("--num-warmups", default=_DEFAULTS.num_warmups, help="Requests before the window, not recorded.")
@click.option("--seed", default=_DEFAULTS.seed, help="Seed of selection, arrivals and sampling.")
@click.option("--ignore-eos", is_flag=True, help="Decode to max_tokens.")
@click.option("--timeout", "timeout_s", default=_DEFAULTS.timeout_s, help="Seconds that one request may take.")
@click.option("--max-failures", default=0, type=click.IntRange(min=0), help="Exit with 1 if more requests failed.")
@click.option("--result-dir", default=None, type=click.Path(file_okay=False, path_type=Path), help="Folder of the results.")
@click.option("--api-key", default=None, envvar="OPENAI_API_KEY", help="Bearer token.", show_default=False)
@click.option("--header", "headers", multiple=True, help="KEY=VALUE sent with every request; may be repeated.")
@click.option("--extra-body", default=None, help="JSON object merged into every request.")
@click.option("--json", "is_json", is_flag=True, help="Print the summary as one JSON object in the last line.")
def command(
    base_url: str,
    model: str | None,
    max_failures: int,
    result_dir: Path | None,
    api_key: str | None,
    headers: Sequence[str],
    extra_body: str | None,
    is_json: bool,
    **options: Any,
) -> None:
    """Send a load to a server, record every request, and summarise."""
    spec = _spec(options)
    arguments = {
        "model": model,
        "api_key": api_key,
        "headers": _headers(headers),
        "extra_body": _extra_body(extra_body),
        "log_path": None if result_dir is None else result_dir / "requests.jsonl",
        "on_start": lambda: _remove_old(result_dir),
    }
    result, exit_status = _run(base_url, spec, arguments)
    summary = _summary(base_url, spec, result)
    if result_dir is not None:
        from ddtree_bench.records import write_json

        write_json(result_dir / "summary.json", summary)
    _print_table(summary)
    if is_json:
        click.echo(json.dumps(summary, ensure_ascii=False))
    if exit_status:
        sys.exit(exit_status)
    if summary["num_failed_requests"] > max_failures:
        click.echo(f"{summary['num_failed_requests']} requests failed; --max-failures is {max_failures}", err=True)
        sys.exit(1)


def _spec(options: dict[str, Any]) -> LoadSpec:
    if options["dataset_name"] is None:
        options["dataset_name"] = "bundled" if options["dataset_path"] is None else "jsonl"
    if options["request_rate"] == float("inf"):  # as vLLM's and SGLang's benchmarks mean it: everything is due at once
        options["request_rate"] = None
        options["max_concurrency"] = options["max_concurrency"] or options["num_prompts"]
    return LoadSpec(**options)


def _headers(given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for (name, mark, _), text in zip(pairs, given, strict=True):
        if not name or not mark:
            raise click.BadParameter(f"must look like KEY=VALUE; given {text!r}", param_hint="--header")
    return {name: value for name, _, value in pairs}


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"must be a JSON object; {error}", param_hint="--extra-body") from error
    if not isinstance(value, dict):
        raise click.BadParameter(f"must be a JSON object; given {text!r}", param_hint="--extra-body")
    return value


def _remove_old(result_dir: Path | None) -> None:
    """Remove the files of an earlier load, so that those of one folder are of one load."""
    if result_dir is not None:
        for name in ("summary.json", "requests.jsonl"):
            (result_dir / name).unlink(missing_ok=True)


def _run(base_url: str, spec: LoadSpec, arguments: Mapping[str, Any]) -> tuple[LoadResult, int]:
    """Run the load; return what it gave and the exit status of the signal that ended it, 0 where none did."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ddtree_bench.load.runner import LoadInterruptedError, run_load

    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        bar = progress.add_task("load", total=spec.num_prompts, note="")
        num_failed = 0

        def on_record(record: Any) -> None:
            nonlocal num_failed
            num_failed += record.outcome != "ok"
            progress.update(bar, advance=1, note=f"{num_failed} failed" if num_failed else "")

        try:
            return run_load(base_url, spec, on_record=on_record, **arguments), 0
        except LoadInterruptedError as interrupted:
            return interrupted.result, interrupted.exit_status


def _summary(base_url: str, spec: LoadSpec, result: LoadResult) -> dict[str, Any]:
    import dataclasses

    from ddtree_bench.metrics.summary import summarise_load
    from ddtree_bench.records import provenance

    made = provenance()
    return summarise_load(
        result,
        date=made["when_utc"],
        base_url=base_url,
        backend=spec.endpoint,
        model_id=result.model,
        request_rate=spec.request_rate,
        burstiness=spec.burstiness,
        max_concurrency=spec.max_concurrency,
        load=dataclasses.asdict(spec),
        provenance=made,
    )


def _print_table(summary: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=False)
    table = Table(title="load", title_justify="left", show_edge=False)
    for name in ("", "mean", "p50", "p90", "p99", "n"):
        table.add_column(name, justify="left" if not name else "right")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        shape = summary[name]
        table.add_row(name, *(_number(shape[part]) for part in ("mean", "p50", "p90", "p99")), str(shape["n"]))
    console.print(table)
    completed = f"{summary['num_completed']} of {summary['num_requests']}"
    rows = {
        "completed": completed,
        "output tok/s": _number(summary["output_tok_s"]),
        "ms per token": _number(summary["ms_per_token"]),
        "acceptance length (bonus counted)": _number(summary["acceptance_length"], 3),
        "drafts accepted per step": _number(summary["acceptance"]["drafts_per_step"], 3),
        "tokens per chunk": _number(summary["tokens_per_chunk"]),
        "window": f"{_number(summary['window_s'])} s",
    }
    for name, value in rows.items():
        console.print(f"{name:<34} {value}", highlight=False)
    for kind, entry in summary["failures"].items():
        console.print(f"failed: {entry['count']} × {kind}: {entry['example']}", highlight=False, markup=False, soft_wrap=True)
    for text in [*summary["notes"], *summary["warnings"]]:
        console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
