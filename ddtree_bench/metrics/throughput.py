"""Throughput: output tokens a second over the window, of one stream, and milliseconds a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddtree_bench.metrics.latency import e2e_ms, tokens_after_first_chunk
from ddtree_bench.records import RequestRecord

Window = tuple[float, float]


def window_of(records: Sequence[RequestRecord]) -> Window | None:
    """Return (first due or sent, last byte) of the records in seconds, for files whose window nobody wrote down."""
    starts = [time for r in records if (time := r.planned_s if r.planned_s is not None else r.sent_s) is not None]
    ends = [record.done_s for record in records if record.done_s is not None]
    return (min(starts), max(ends)) if starts and ends else None


def completed(records: Sequence[RequestRecord], window: Window | None = None) -> list[RequestRecord]:
    """Return the requests that succeeded and ended inside the window."""
    ok = [record for record in records if record.outcome == "ok"]
    if window is None:
        return ok
    return [record for record in ok if record.done_s is None or record.done_s <= window[1]]


def total_output_tokens(records: Sequence[RequestRecord]) -> int | None:
    """Return Σ output tokens of the succeeded requests; None where one of them is unknown, since a part is no total."""
    tokens = [record.output_tokens for record in records if record.outcome == "ok"]
    known = [count for count in tokens if count is not None]
    return sum(known) if len(known) == len(tokens) else None


def total_input_tokens(records: Sequence[RequestRecord]) -> int | None:
    """Return Σ prompt tokens of the succeeded requests; None where one of them is unknown."""
    tokens = [record.prompt_tokens for record in records if record.outcome == "ok"]
    known = [count for count in tokens if count is not None]
    return sum(known) if len(known) == len(tokens) else None


def output_tok_s(records: Sequence[RequestRecord], window: Window) -> float | None:
    """Return output tokens of completed requests / window."""
    tokens = total_output_tokens(completed(records, window))
    seconds = window[1] - window[0]
    return None if tokens is None or seconds <= 0 else tokens / seconds


def request_s(records: Sequence[RequestRecord], window: Window) -> float | None:
    """Return completed requests / window."""
    seconds = window[1] - window[0]
    return len(completed(records, window)) / seconds if seconds > 0 else None


def stream_tok_s(record: RequestRecord) -> float | None:
    """Return tokens after the first chunk / (last token − first token) of one stream."""
    tokens = tokens_after_first_chunk(record)
    if tokens is None or tokens <= 0 or record.first_token_s is None or record.last_token_s is None:
        return None
    seconds = record.last_token_s - record.first_token_s
    return tokens / seconds if seconds > 0 else None


def request_ms_per_token(record: RequestRecord) -> float | None:
    """Return E2E / output tokens of one request: everything that its tokens cost, prefill and drafting included."""
    total_ms = e2e_ms(record)
    if record.outcome != "ok" or total_ms is None or not record.output_tokens:
        return None
    return total_ms / record.output_tokens


def ms_per_token(records: Sequence[RequestRecord]) -> float | None:
    """Return Σ E2E / Σ output tokens of the succeeded requests with known tokens: a ratio of sums, never a mean of ratios."""
    known = [record for record in records if request_ms_per_token(record) is not None]
    tokens = sum(record.output_tokens or 0 for record in known)
    return math.fsum(e2e_ms(record) or 0.0 for record in known) / tokens if tokens else None


def totals(records: Sequence[RequestRecord], window: Window | None) -> dict[str, Any]:
    """Return the window's counts and rates under the names of summary.json."""
    span = window if window is not None else window_of(records)
    inside = completed(records, span)
    return {
        "window_s": None if span is None else span[1] - span[0],
        "num_requests": len(records),
        "num_completed": len(inside),
        "num_failed_requests": sum(record.outcome != "ok" for record in records),
        "input_tokens": total_input_tokens(inside),
        "output_tokens": total_output_tokens(inside),
        "output_tok_s": None if span is None else output_tok_s(records, span),
        "request_s": None if span is None else request_s(records, span),
        "ms_per_token": ms_per_token(inside),
    }
