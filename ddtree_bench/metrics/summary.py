"""Folds the records of one load into summary.json, and into the flat names of a trial.

Besides the project's own words the summary holds, flat, the names that vLLM's and SGLang's benchmarks write, so that scripts
made for those read it; where a definition differs, `docs/metrics.md` says how.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddtree_bench.metrics import latency
from ddtree_bench.metrics.acceptance import Acceptance, acceptance, acceptance_by_context, accepted_of, context_warnings
from ddtree_bench.metrics.distinct import distinct_ngram_share
from ddtree_bench.metrics.intervals import Interval, bootstrap_ratio
from ddtree_bench.metrics.throughput import Window, completed, request_ms_per_token, stream_tok_s, totals, window_of
from ddtree_bench.records import RequestRecord

SCHEMA_VERSION = 1
_MAX_SHARE_OF_TTFT = 0.01  # the client's own delay, as a share of the median TTFT, above which a result is flagged
_MAX_CPU_SHARE = 0.7  # of one core
_FLAT_STEMS = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "itl_ms": "itl_ms", "e2e_ms": "e2el_ms"}


def summarise(
    records: Sequence[RequestRecord],
    window: Window | None = None,
    *,
    client: Mapping[str, Any] | None = None,
    counters: Mapping[str, float] | None = None,
    counters_reason: str | None = None,
    accepted_per_position: Mapping[int, float] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        records: every measured request, failed ones included.
        window: (start, end) in seconds on the records' clock; None takes first due to last byte.
        client: the client's own health, as `ClientHealth.report` gives it.
        counters: differences of the server's counters over the window; used only where requests tell no counts.
        counters_reason: why there are no counters.
        accepted_per_position: the counters of accepted draft tokens by position, over the window.
        about: what else is kept as it is: dataset, model, load, notes, provenance, …
    """
    window = window if window is not None else window_of(records)
    done = completed(records, window)
    pooled, by_context = acceptance(done, counters, counters_reason, accepted_per_position), acceptance_by_context(done)
    latencies = latency.latencies(done)
    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **about,
        **totals(records, window),
        "failures": failures(records),
        **latencies,
        "stream_tok_s": latency.distribution(stream_tok_s(record) for record in done),
        "tokens_per_chunk": latency.tokens_per_chunk(done),
        "distinct_4gram_share": distinct_ngram_share(record.text for record in done),
        "acceptance_length": pooled.acceptance_length,
        "depth_survival": None if pooled.depth_survival is None else list(pooled.depth_survival),
        "acceptance": pooled.to_dict(),
        "acceptance_by_context": {
            name: {"acceptance_length": one.acceptance_length, "num_requests": one.num_requests}
            for name, one in by_context.items()
        },
        "intervals": _intervals(done),
        "client": {**_send_delay(records), **(client or {})},
        "server_counters": dict(counters or {}) or {"reason": counters_reason},
        "classes": _classes(records, window),
    }
    summary["warnings"] = [*_warnings(summary, records, pooled), *context_warnings(by_context)]
    return summary | _flat(summary, done)


def summarise_load(result: Any, **about: Any) -> dict[str, Any]:
    """Return the summary of a `LoadResult`."""
    return summarise(
        result.records,
        result.window,
        client=result.client,
        counters=result.counters.values,
        counters_reason=result.counters.reason,
        accepted_per_position=result.counters.accepted_per_position,
        dataset=dict(result.dataset),
        model=result.model,
        num_failed_warmups=result.num_failed_warmups,
        is_interrupted=result.is_interrupted,
        notes=list(result.notes),
        **about,
    )


def trial_metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat metrics of a trial (`records.TrialRecord`) from a summary; None where unknown."""
    metrics = {
        name: summary[name]
        for name in (
            "output_tok_s",
            "acceptance_length",
            "ms_per_token",
            "num_requests",
            "num_failed_requests",
            "output_tokens",
            "window_s",
            "depth_survival",
        )
    }
    metrics |= {name: summary["acceptance"][name] for name in ("num_verify_steps", "num_accepted", "num_draft_tokens")}
    for word in ("ttft", "tpot", "itl", "e2e"):
        metrics |= {f"{word}_{part}_ms": summary[f"{word}_ms"][part] for part in ("mean", "p50", "p90", "p99")}
    return metrics


def failures(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Return {kind: {count, example}} of the requests that failed, the most frequent first; the example is the first message."""
    failed = [record for record in records if record.outcome != "ok"]
    counts = Counter(record.error_kind for record in failed)
    examples = {record.error_kind: record.error_message for record in reversed(failed)}
    return {str(kind): {"count": count, "example": examples[kind]} for kind, count in counts.most_common()}


def prompt_of(record: RequestRecord) -> str:
    """Return the prompt that a request is a sample of: a repeat `ID#2` belongs to ID."""
    stem, mark, repeat = record.prompt_id.rpartition("#")
    return stem if mark and repeat.isdigit() else record.prompt_id


def _intervals(done: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return 95 % intervals over prompts of the two numbers that a sweep ranks by."""
    timed = [record for record in done if request_ms_per_token(record) is not None]
    counted = [record for record in done if record.num_verify_steps and accepted_of(record) is not None]
    per_token = bootstrap_ratio(
        [latency.e2e_ms(record) or 0.0 for record in timed],
        [float(record.output_tokens or 0) for record in timed],
        [prompt_of(record) for record in timed],
    )
    accepted = bootstrap_ratio(
        [float((accepted_of(record) or 0) + (record.num_verify_steps or 0)) for record in counted],
        [float(record.num_verify_steps or 0) for record in counted],
        [prompt_of(record) for record in counted],
    )
    return {"ms_per_token": _pair(per_token), "acceptance_length": _pair(accepted)}


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _send_delay(records: Sequence[RequestRecord]) -> dict[str, Any]:
    known = [delay for record in records if (delay := latency.send_delay_ms(record)) is not None]
    shape = latency.distribution(known)
    return {"send_delay": {"p50_ms": shape["p50"], "p99_ms": shape["p99"], "max_ms": max(known, default=None)}}


def _classes(records: Sequence[RequestRecord], window: Window | None) -> dict[str, Any]:
    """Return the main numbers of each class of prompts; rates over the window are left to the whole."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.class_ is not None:
            groups.setdefault(record.class_, []).append(record)
    table = {}
    for name, group in sorted(groups.items()):
        counts, pooled = totals(group, window), acceptance(group)
        table[name] = {
            **{key: counts[key] for key in ("num_requests", "num_failed_requests", "output_tokens", "ms_per_token")},
            "acceptance_length": pooled.acceptance_length,
            "depth_survival": None if pooled.depth_survival is None else list(pooled.depth_survival),
            **{key: value for key, value in latency.latencies(group).items() if key in ("ttft_ms", "tpot_ms", "e2e_ms")},
        }
    return table


def _warnings(summary: Mapping[str, Any], records: Sequence[RequestRecord], pooled: Acceptance) -> list[str]:
    warnings = list(pooled.warnings)
    if pooled.acceptance_length is None and pooled.reason:
        warnings.append(f"acceptance_length is unknown: {pooled.reason}")
    if summary["output_tokens"] is None:
        warnings.append("output_tok_s is unknown: the server did not tell the output tokens of every request")
    if (summary["tokens_per_chunk"] or 0) > 1:
        warnings.append(
            f"itl_ms is a gap between chunks of {summary['tokens_per_chunk']:.2f} tokens, not a time per token; see tpot_ms"
        )
    if summary.get("num_failed_warmups"):
        warnings.append(f"{summary['num_failed_warmups']} warm-up requests failed: the window may hold what they were for")
    warnings += _percentile_notes(summary)
    warnings += _client_flags(summary)
    told = Counter(warning for record in records for warning in record.warnings)
    return warnings + [f"{text} ({count} requests)" for text, count in told.most_common()]


def _percentile_notes(summary: Mapping[str, Any]) -> list[str]:
    fewest = summary["ttft_ms"]["n"]
    missing = [f"p{p} needs {latency.samples_needed(p)}" for p in latency.PERCENTILES if fewest < latency.samples_needed(p)]
    return [f"percentiles with too few samples are null: {', '.join(missing)}; {fewest} requests completed"] if missing else []


def _client_flags(summary: Mapping[str, Any]) -> list[str]:
    client, median_ms = summary["client"], summary["ttft_ms"]["p50"]
    flags = []
    delay, lag = client["send_delay"], client.get("loop_lag") or {}
    worst = {
        "send delay": delay["p99_ms"] if delay["p99_ms"] is not None else delay["max_ms"],
        "event-loop lag": lag.get("p99_ms"),
    }
    for what, value in worst.items():
        if value is not None and median_ms and value > _MAX_SHARE_OF_TTFT * median_ms:
            flags.append(f"the client's own {what} of {value:.2f} ms is over 1 % of the median TTFT of {median_ms:.2f} ms")
    share = client.get("cpu_share")
    is_long = (summary["window_s"] or 0.0) >= 1.0  # below, starting up is most of it
    if is_long and share is not None and share > _MAX_CPU_SHARE:
        flags.append(f"the client used {share:.0%} of a core: it may be what was measured")
    return flags


def _flat(summary: Mapping[str, Any], done: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the names of vLLM's and SGLang's benchmark files."""
    tokens_in, tokens_out, seconds = summary["input_tokens"], summary["output_tokens"], summary["window_s"]
    both = None if tokens_in is None or tokens_out is None or not seconds else (tokens_in + tokens_out) / seconds
    rate, survival = summary["acceptance"]["draft_acceptance_rate"], summary["depth_survival"]
    flat: dict[str, Any] = {
        "duration": seconds,
        "completed": summary["num_completed"],
        "failed": summary["num_failed_requests"],
        "num_prompts": summary["num_requests"],
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": summary["request_s"],
        "output_throughput": summary["output_tok_s"],
        "total_token_throughput": both,
        "total_throughput": both,
        "accept_length": summary["acceptance_length"],
        "spec_decode_acceptance_length": summary["acceptance_length"],
        "spec_decode_acceptance_rate": None if rate is None else rate * 100.0,
        "spec_decode_num_drafts": summary["acceptance"]["num_verify_steps"],
        "spec_decode_draft_tokens": summary["acceptance"]["num_draft_tokens"],
        "spec_decode_accepted_tokens": summary["acceptance"]["num_accepted"],
        "spec_decode_per_position_acceptance_rates": survival,
    }
    samples: dict[str, list[float | None]] = {
        "ttft_ms": [latency.ttft_ms(record) for record in done],
        "tpot_ms": [latency.tpot_ms(record) for record in done],
        "itl_ms": [*(gap for record in done for gap in latency.itl_ms(record))],
        "e2e_ms": [latency.e2e_ms(record) for record in done],
    }
    for ours, theirs in _FLAT_STEMS.items():
        known = [value for value in samples[ours] if value is not None]
        flat[f"mean_{theirs}"] = summary[ours]["mean"]
        flat[f"median_{theirs}"] = summary[ours]["p50"]
        flat[f"std_{theirs}"] = statistics.pstdev(known) if known else None
        flat[f"p99_{theirs}"] = summary[ours]["p99"]
    flat |= {f"{name}_e2e_latency_ms": flat[f"{name}_e2el_ms"] for name in ("mean", "median", "std", "p99")}
    return flat
