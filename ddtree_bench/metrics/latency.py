"""Latency of one request and of many: TTFT, TTFA, ITL, TPOT, E2E by the glossary.

All values in milliseconds. A streamed chunk is not a token: TPOT needs token counts and is None where they are unknown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ddtree_bench.records import RequestRecord

PERCENTILES = (50, 90, 99)


def _gap_ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else (end_s - start_s) * 1000.0


def ttft_ms(record: RequestRecord) -> float | None:
    """Return request sent → first content, reasoning or tool-call delta with something in it."""
    return _gap_ms(record.sent_s, record.first_token_s)


def ttfa_ms(record: RequestRecord) -> float | None:
    """Return request sent → first delta of the answer itself, after reasoning."""
    return _gap_ms(record.sent_s, record.first_answer_s)


def e2e_ms(record: RequestRecord) -> float | None:
    """Return request sent → last byte."""
    return _gap_ms(record.sent_s, record.done_s)


def send_delay_ms(record: RequestRecord) -> float | None:
    """Return planned send → real send."""
    return _gap_ms(record.planned_s, record.sent_s)


def e2e_from_planned_ms(record: RequestRecord) -> float | None:
    """Return planned send → last byte: what a user of an open system waits, the client's own queue included."""
    return _gap_ms(record.planned_s, record.done_s)


def itl_ms(record: RequestRecord) -> list[float]:
    """Return the gaps between consecutive content chunks; a chunk may hold several tokens."""
    times = [float(chunk[0] or 0.0) for chunk in record.chunks]
    return [(later - earlier) * 1000.0 for earlier, later in itertools.pairwise(times)]


def first_chunk_tokens(record: RequestRecord) -> int | None:
    """Return how many tokens the first content chunk held; None where nobody told."""
    if not record.chunks:
        return None
    tokens = record.chunks[0][1]
    if tokens is not None:
        return int(tokens)
    return 1 if record.output_tokens == len(record.chunks) else None  # as many tokens as chunks: each chunk is one


def tokens_after_first_chunk(record: RequestRecord) -> int | None:
    """Return output_tokens − tokens in the first chunk; None where either is unknown."""
    first = first_chunk_tokens(record)
    if first is None or record.output_tokens is None:
        return None
    return record.output_tokens - first


def tpot_ms(record: RequestRecord) -> float | None:
    """Return (last token − first token) / (tokens − tokens in the first chunk).

    None where counts are unknown, and for a reply that came at one instant: it tells nothing about the time of a token.
    """
    tokens = tokens_after_first_chunk(record)
    span_ms = _gap_ms(record.first_token_s, record.last_token_s)
    if tokens is None or tokens <= 0 or not span_ms:
        return None
    return span_ms / tokens


def tokens_per_chunk(records: Iterable[RequestRecord]) -> float | None:
    """Return pooled output tokens / content chunks of the requests whose tokens are known."""
    known = [record for record in records if record.output_tokens is not None and record.chunks]
    num_chunks = sum(len(record.chunks) for record in known)
    return sum(record.output_tokens or 0 for record in known) / num_chunks if num_chunks else None


def samples_needed(percentile: float) -> int:
    """Return the fewest samples of which at least one is expected beyond the percentile: p90 needs 10, p99 needs 100."""
    return max(1, math.ceil(100.0 / (100.0 - percentile) - 1e-9)) if percentile > 50 else 1


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile of raw samples (linear between neighbours); None with fewer than `samples_needed`."""
    if len(values) < samples_needed(percent):
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100.0
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Iterable[float | None]) -> dict[str, Any]:
    """Return {mean, p50, p90, p99, n}; unknown samples are left out and a percentile with too few samples is None."""
    known = [value for value in values if value is not None]
    mean = math.fsum(known) / len(known) if known else None
    return {"mean": mean, **{f"p{p}": percentile(known, p) for p in PERCENTILES}, "n": len(known)}


def latencies(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Return the distribution of every latency over the requests that succeeded; ITL pools the gaps of all requests."""
    ok = [record for record in records if record.outcome == "ok"]
    return {
        "ttft_ms": distribution(ttft_ms(record) for record in ok),
        "ttfa_ms": distribution(ttfa_ms(record) for record in ok),
        "tpot_ms": distribution(tpot_ms(record) for record in ok),
        "itl_ms": distribution(gap for record in ok for gap in itl_ms(record)),
        "e2e_ms": distribution(e2e_ms(record) for record in ok),
        "e2e_from_planned_ms": distribution(e2e_from_planned_ms(record) for record in ok),
    }
