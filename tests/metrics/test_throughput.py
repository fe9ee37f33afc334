"""Throughput is tokens over the wall clock, known tokens only."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_bench.metrics import throughput
from ddtree_bench.records import RequestRecord


def reply(sent_s: float, done_s: float, output_tokens: int | None, **more: Any) -> RequestRecord:
    return RequestRecord(request_id="r", prompt_id="p", sent_s=sent_s, done_s=done_s, output_tokens=output_tokens, **more)


def test_output_tokens_of_completed_requests_over_the_window() -> None:
    records = [reply(0, 1, 30), reply(0, 2, 50), reply(0, 2, 99, outcome="error", error_kind="truncated")]
    assert throughput.output_tok_s(records, (0.0, 4.0)) == 20.0
    assert throughput.request_s(records, (0.0, 4.0)) == 0.5


def test_request_that_ends_after_the_window_is_outside() -> None:
    assert throughput.output_tok_s([reply(0, 1, 30), reply(0, 5, 50)], (0.0, 2.0)) == 15.0


def test_one_unknown_count_makes_the_total_unknown_and_no_part_of_it() -> None:
    records = [reply(0, 1, 30), reply(0, 1, None)]
    assert throughput.total_output_tokens(records) is None
    assert throughput.output_tok_s(records, (0.0, 1.0)) is None
    assert throughput.ms_per_token(records) == pytest.approx(1000 / 30)


def test_all_failed_is_a_measured_0() -> None:
    assert throughput.output_tok_s([reply(0, 1, None, outcome="error", error_kind="connect")], (0.0, 1.0)) == 0.0


def test_ms_per_token_holds_everything_that_the_request_waited_for() -> None:
    """Sums over sums of the whole request: prefill and drafting are in it, and short requests do not weigh more."""
    records = [reply(0, 2, 100), reply(0, 1, 10)]
    assert throughput.ms_per_token(records) == pytest.approx(3000 / 110)
    assert throughput.request_ms_per_token(records[1]) == pytest.approx(100)


def test_stream_speed_leaves_the_first_chunk_out() -> None:
    record = reply(0, 2, 106, first_token_s=1.0, last_token_s=2.0, chunks=[[1.0, 6], [2.0, 100]])
    assert throughput.stream_tok_s(record) == pytest.approx(100.0)
    assert throughput.stream_tok_s(reply(0, 1, 5)) is None


def test_window_of_records_begins_when_the_first_was_due() -> None:
    assert throughput.window_of([reply(1, 3, 5, planned_s=0.5), reply(1, 4, 5, planned_s=0.7)]) == (0.5, 4)
    assert throughput.window_of([]) is None
