"""The summary: what it holds, what it calls unknown, and the names that other tools read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddtree_bench.metrics.summary import failures, prompt_of, summarise, trial_metrics
from ddtree_bench.records import RequestRecord


def reply(number: int, **more: Any) -> RequestRecord:
    """A reply of 11 tokens in three chunks of 1, 5 and 5 over 20 ms, from two steps that accepted 4 each."""
    start = number / 10
    given: dict[str, Any] = {
        "request_id": f"r{number}",
        "prompt_id": f"p{number}",
        "class_": "code" if number % 2 else "prose",
        "planned_s": start,
        "sent_s": start,
        "first_token_s": start + 0.05,
        "last_token_s": start + 0.07,
        "done_s": start + 0.07,
        "chunks": [[start + 0.05, 1], [start + 0.06, 5], [start + 0.07, 5]],
        "text": f"a b c d {number}",
        "prompt_tokens": 7,
        "output_tokens": 11,
        "token_source": "usage",
        "num_verify_steps": 2,
        "num_accepted": 8,
        "num_draft_tokens": 30,
        "num_cut": 0,
        "accepted_histogram": [0, 0, 0, 0, 2],
    }
    return RequestRecord(**given | more)


def failed(number: int, kind: str, message: str) -> RequestRecord:
    return RequestRecord(request_id=f"f{number}", prompt_id=f"f{number}", outcome="error", error_kind=kind, error_message=message)


def test_totals_latencies_and_acceptance() -> None:
    summary = summarise([reply(i) for i in range(10)], (0.0, 1.0))
    assert (summary["num_requests"], summary["num_completed"], summary["output_tokens"]) == (10, 10, 110)
    assert summary["output_tok_s"] == pytest.approx(110)
    assert summary["tpot_ms"]["mean"] == pytest.approx(2.0)
    assert set(summary["ttft_ms"]) == {"mean", "p50", "p90", "p99", "n"}
    assert (summary["ttft_ms"]["p90"], summary["ttft_ms"]["p99"]) == (pytest.approx(50), None)
    assert summary["acceptance_length"] == 5.0
    assert summary["depth_survival"] == [1.0] * 4
    assert summary["acceptance"]["mean_verify_width"] == 16.0
    assert summary["intervals"]["acceptance_length"] == [5.0, 5.0]
    assert summary["classes"]["code"]["num_requests"] == 5
    assert any("p99 needs 100" in text for text in summary["warnings"])
    json.dumps(summary, allow_nan=False)


def test_gap_of_a_chunk_with_several_tokens_is_flagged() -> None:
    summary = summarise([reply(0)])
    assert summary["itl_ms"]["mean"] == pytest.approx(10)
    assert any("gap between chunks of 3.67 tokens" in text for text in summary["warnings"])


def test_drafts_that_contribute_nothing_are_warned_of_in_the_summary() -> None:
    summary = summarise([reply(0, num_accepted=0, accepted_histogram=[2], num_cut=None)])
    assert any("draft contributes nothing" in text for text in summary["warnings"])


def test_acceptance_by_context_stands_in_the_summary() -> None:
    far = reply(1, prompt_tokens=9000, num_accepted=2, accepted_histogram=[1, 0, 1], num_cut=None)
    summary = summarise([reply(0), far])
    assert summary["acceptance_by_context"]["8K to 32K prompt tokens"] == {"acceptance_length": 2.0, "num_requests": 1}
    assert any("the drafter may not reach that far" in text for text in summary["warnings"])


def test_names_that_other_tools_read() -> None:
    summary = summarise([reply(i) for i in range(100)])
    assert (summary["completed"], summary["failed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (
        100,
        0,
        700,
        1100,
    )
    assert summary["output_throughput"] == summary["output_tok_s"]
    assert summary["request_throughput"] == pytest.approx(100 / summary["duration"])
    for name in ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "std_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"):
        assert summary[name] is not None
    assert summary["mean_e2e_latency_ms"] == summary["mean_e2el_ms"]
    assert summary["accept_length"] == summary["spec_decode_acceptance_length"] == 5.0
    assert summary["spec_decode_acceptance_rate"] == pytest.approx(100 * 8 / 30)


def test_failures_by_kind_with_the_first_message() -> None:
    records = [failed(0, "timeout", "one"), failed(1, "http_503", "two"), failed(2, "http_503", "three")]
    assert failures(records) == {"http_503": {"count": 2, "example": "two"}, "timeout": {"count": 1, "example": "one"}}


def test_all_failed_and_no_records_are_summaries_too() -> None:
    for records in ([failed(0, "connect", "refused")], []):
        summary = summarise(records, (0.0, 2.0))
        assert summary["num_failed_requests"] == len(records)
        assert (summary["output_tok_s"], summary["acceptance_length"], summary["mean_ttft_ms"]) == (0.0, None, None)
        assert summary["ttft_ms"]["n"] == 0
        json.dumps(summary, allow_nan=False)
    assert summarise([])["window_s"] is None


def test_trial_metrics_hold_the_names_of_a_trial() -> None:
    metrics = trial_metrics(summarise([reply(i) for i in range(10)]))
    names = {
        "output_tok_s",
        "acceptance_length",
        "ms_per_token",
        "num_requests",
        "num_failed_requests",
        "output_tokens",
        "window_s",
    }
    names |= {"num_verify_steps", "num_accepted", "num_draft_tokens", "depth_survival"}
    names |= {f"{word}_{part}_ms" for word in ("ttft", "tpot", "e2e") for part in ("mean", "p50", "p90", "p99")}
    assert names <= metrics.keys()
    assert metrics["ttft_p50_ms"] == pytest.approx(50)
    assert metrics["num_verify_steps"] == 20


def test_client_delay_over_1_percent_of_ttft_is_flagged() -> None:
    late = [reply(i, planned_s=i / 10 - 0.01) for i in range(3)]
    client = {"loop_lag": {"p50_ms": 0.1, "p99_ms": 4.0}, "cpu_share": 0.9}
    warnings = summarise(late, (0.0, 2.0), client=client)["warnings"]
    assert any("send delay of 10.00 ms" in text for text in warnings)
    assert any("event-loop lag of 4.00 ms" in text for text in warnings)
    assert any("90% of a core" in text for text in warnings)


def test_what_the_server_told_wrong_is_counted() -> None:
    records = [reply(i, accepted_histogram=None, warnings=("the histogram is off",)) for i in range(3)]
    summary = summarise(records)
    assert "the histogram is off (3 requests)" in summary["warnings"]
    assert summary["depth_survival"] is None


@pytest.mark.parametrize(("given", "expected"), [("p1", "p1"), ("p1#2", "p1"), ("c#", "c#"), ("#1", "")])
def test_repeats_belong_to_their_prompt(given: str, expected: str) -> None:
    assert prompt_of(reply(0, prompt_id=given)) == expected


def test_warm_ups_that_failed_are_told() -> None:
    assert any("2 warm-up requests failed" in text for text in summarise([reply(0)], num_failed_warmups=2)["warnings"])
    assert not any("warm-up" in text for text in summarise([reply(0)], num_failed_warmups=0)["warnings"])


def test_counters_by_position_give_the_depth_survival() -> None:
    blind = reply(0, num_verify_steps=None, num_accepted=None, num_draft_tokens=None, num_cut=None, accepted_histogram=None)
    counters = {"num_verify_steps": 10.0, "num_accepted": 12.0, "num_draft_tokens": 40.0}
    summary = summarise([blind], counters=counters, accepted_per_position={0: 8.0, 1: 4.0, 2: 0.0})
    assert summary["depth_survival"] == [0.8, 0.4]
    assert 1 + sum(summary["depth_survival"]) == pytest.approx(summary["acceptance_length"])
