"""Latency of a request by the glossary's formulas, and percentiles that are null rather than made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddtree_bench.metrics import latency
from ddtree_bench.records import RequestRecord


def stream(
    times_ms: Sequence[float], tokens: Sequence[int | None], output_tokens: int | None = None, **more: Any
) -> RequestRecord:
    """A reply whose content chunks came at the times, sent at 0."""
    known = [count for count in tokens if count is not None]
    given: dict[str, Any] = {
        "request_id": "r",
        "prompt_id": "p",
        "sent_s": 0.0,
        "first_token_s": times_ms[0] / 1000,
        "last_token_s": times_ms[-1] / 1000,
        "done_s": times_ms[-1] / 1000,
        "chunks": [[t / 1000, count] for t, count in zip(times_ms, tokens, strict=True)],
        "output_tokens": sum(known) if output_tokens is None and len(known) == len(tokens) else output_tokens,
    }
    return RequestRecord(**given | more)


def test_tpot_is_per_token_and_itl_is_per_chunk() -> None:
    record = stream([0, 10, 20], [1, 5, 5])
    assert latency.tpot_ms(record) == pytest.approx(2.0)
    assert latency.itl_ms(record) == pytest.approx([10.0, 10.0])
    assert latency.tokens_per_chunk([record]) == pytest.approx(11 / 3)


def test_first_chunk_of_six_tokens_is_taken_off() -> None:
    record = stream([100, 1100], [6, 100])
    assert latency.tokens_after_first_chunk(record) == 100
    assert latency.tpot_ms(record) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "record",
    [
        stream([100], [64]),
        stream([100], [1]),
        stream([100, 100], [1, 5]),
        stream([100, 140], [None, None], output_tokens=8),
        stream([100, 140], [None, None]),
        stream([100, 140], [8, 0], output_tokens=8),
    ],
    ids=["one chunk", "one token", "one instant", "chunks of unknown tokens", "no tokens known", "all in the first chunk"],
)
def test_unknown_tpot_is_none(record: RequestRecord) -> None:
    assert latency.tpot_ms(record) is None


def test_as_many_chunks_as_tokens_makes_each_chunk_one_token() -> None:
    assert latency.tpot_ms(stream([100, 120, 140], [None] * 3, output_tokens=3)) == pytest.approx(20.0)


def test_reply_without_a_chunk_has_no_latency_but_an_end() -> None:
    record = RequestRecord(
        request_id="r", prompt_id="p", planned_s=0.0, sent_s=0.1, done_s=0.3, outcome="error", error_kind="empty"
    )
    assert (latency.ttft_ms(record), latency.ttfa_ms(record), latency.tpot_ms(record), latency.itl_ms(record)) == (
        None,
        None,
        None,
        [],
    )
    assert latency.e2e_ms(record) == pytest.approx(200)
    assert latency.send_delay_ms(record) == pytest.approx(100)
    assert latency.e2e_from_planned_ms(record) == pytest.approx(300)


@pytest.mark.parametrize(("percent", "needed"), [(50, 1), (90, 10), (95, 20), (99, 100), (99.9, 1000)])
def test_percentile_with_too_few_samples_is_none(percent: float, needed: int) -> None:
    assert latency.samples_needed(percent) == needed
    assert latency.percentile([1.0] * (needed - 1), percent) is None
    assert latency.percentile([1.0] * needed, percent) == 1.0


def test_percentile_between_raw_samples() -> None:
    assert latency.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert latency.percentile(list(range(101)), 90) == 90


def test_distribution_leaves_unknown_out_and_never_counts_it_as_0() -> None:
    shape = latency.distribution([None, 2.0, 4.0])
    assert shape == {"mean": 3.0, "p50": 3.0, "p90": None, "p99": None, "n": 2}
    assert latency.distribution([])["mean"] is None


def test_failed_requests_have_no_part_in_latencies() -> None:
    failed = stream([5], [None], outcome="error", error_kind="truncated")
    shapes = latency.latencies([failed, stream([100, 110], [1, 1])])
    assert (shapes["ttft_ms"]["n"], shapes["ttft_ms"]["mean"]) == (1, pytest.approx(100))
