"""Counters of a window: differences, never lifetime values; missing, foreign and reset ones are a reason and no number."""

from __future__ import annotations

import pytest

from ddtree_bench.load.server_metrics import Counters, difference, parse_counters
from ddtree_bench.metrics.acceptance import acceptance


def vllm(steps: int, accepted: int, drafts: int = 0, per_position: tuple[int, ...] = ()) -> Counters:
    lines = [
        f'vllm:spec_decode_num_drafts_total{{engine="0"}} {steps}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafts}',
        *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}' for i, n in enumerate(per_position)),
    ]
    return parse_counters("\n".join(lines) + "\n")


def sglang(steps: int, tokens: int, requests: int) -> Counters:
    return parse_counters(
        f"# TYPE sglang:spec_verify_calls counter\nsglang:spec_verify_calls_total {steps}\n"
        f"sglang:generation_tokens_total {tokens}\nsglang:num_requests_total {requests}\n"
    )


def test_lifetime_average_holds_the_warm_up_and_the_window_does_not() -> None:
    warm = vllm(steps=50, accepted=50 * 11)
    end = vllm(steps=150, accepted=50 * 11 + 100 * 5)
    window = difference(warm, end)
    assert acceptance([], window.values).acceptance_length == 6.0
    assert acceptance([], end.values).acceptance_length == 8.0  # what a lifetime average would have said


def test_after_a_flush_acceptance_is_unavailable_and_neither_0_nor_the_old_value() -> None:
    before, after = vllm(steps=100, accepted=500), vllm(steps=5, accepted=20)
    window = difference(before, after)
    pooled = acceptance([], window.values, window.reason)
    assert window.values == {}
    assert pooled.acceptance_length is None
    assert "reset its counters" in (pooled.reason or "")
    absent = difference(before, parse_counters("sglang:num_running_reqs 0\n"))
    pooled = acceptance([], absent.values, absent.reason)
    assert (pooled.acceptance_length, pooled.num_verify_steps) == (None, None)
    assert "unavailable" in (pooled.reason or "")


def test_sglang_tokens_less_one_prefill_token_a_request() -> None:
    window = difference(sglang(10, 100, 2), sglang(30, 164, 6))
    assert acceptance([], window.values).acceptance_length == 1 + (64 - 4 - 20) / 20


def test_engines_are_added_up_and_a_server_of_both_dialects_counts_once() -> None:
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 3\nvllm:spec_decode_num_drafts_total{engine="1"} 4\n'
        "sglang:spec_verify_calls_total 7\n"
    )
    assert parse_counters(text).values["num_verify_steps"] == 7


def test_per_position_difference() -> None:
    window = difference(vllm(2, 3, 30, (2, 1)), vllm(6, 9, 90, (5, 3, 1)))
    assert dict(window.accepted_per_position) == {0: 3, 1: 2, 2: 1}
    pooled = acceptance([], window.values)
    assert (pooled.draft_acceptance_rate, pooled.mean_verify_width) == (0.1, 16.0)


@pytest.mark.parametrize("text", ["<html>", "", "{}", "nginx_connections 3\n", "x{y=\n"])
def test_foreign_metrics_are_a_reason(text: str) -> None:
    counters = parse_counters(text)
    assert counters.values == {}
    assert counters.reason


def test_no_step_in_the_window_is_a_reason() -> None:
    pooled = acceptance([], difference(vllm(5, 5), vllm(5, 5)).values)
    assert pooled.acceptance_length is None
    assert "no verify step" in (pooled.reason or "")
