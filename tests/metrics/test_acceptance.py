"""Acceptance by its one definition, and None with the reason where nobody told."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_bench.metrics.acceptance import (
    acceptance,
    acceptance_by_context,
    context_warnings,
    depth_survival,
    request_acceptance_length,
)
from ddtree_bench.records import RequestRecord


def of_walks(*accepted: int, num_drafts: int | None = None, **more: Any) -> RequestRecord:
    """A request whose verify steps accepted these many draft tokens."""
    histogram = [accepted.count(depth) for depth in range(max(accepted, default=0) + 1)]
    given: dict[str, Any] = {
        "request_id": "r",
        "prompt_id": "p",
        "num_verify_steps": len(accepted),
        "num_accepted": sum(accepted),
        "num_draft_tokens": None if num_drafts is None else num_drafts * len(accepted),
        "accepted_histogram": histogram,
        "output_tokens": 1 + sum(accepted) + len(accepted),
    }
    return RequestRecord(**given | more)


def counts(committed: int, steps: int) -> RequestRecord:
    return RequestRecord(request_id="r", prompt_id="p", num_verify_steps=steps, num_accepted=committed - steps)


def test_with_and_without_the_bonus_differ_by_one_and_both_have_names() -> None:
    pooled = acceptance([of_walks(0, 3, 15)])
    assert (pooled.acceptance_length, pooled.drafts_per_step) == (7.0, 6.0)


@pytest.mark.parametrize(("node_budget", "width"), [(64, 65.0), (63, 64.0)])
def test_verify_width_is_told_beside_the_budget(node_budget: int, width: float) -> None:
    pooled = acceptance([of_walks(2, 4, num_drafts=node_budget)])
    assert pooled.mean_verify_width == width
    assert pooled.num_draft_tokens == 2 * node_budget


def test_pooled_and_request_mean_order_two_arms_the_other_way() -> None:
    """A commits {100 in 10 steps, 5 in 5}, B {90 in 10, 14 in 5}: request means say B, the pooled ones say A."""
    a, b = acceptance([counts(100, 10), counts(5, 5)]), acceptance([counts(90, 10), counts(14, 5)])
    assert (a.request_mean, b.request_mean) == (5.5, pytest.approx(5.9))
    assert a.acceptance_length == pytest.approx(7.0)
    assert b.acceptance_length == pytest.approx(104 / 15)


def test_acceptance_of_1_is_a_hard_warning() -> None:
    pooled = acceptance([of_walks(0, 0, 0, num_drafts=15)])
    assert pooled.acceptance_length == 1.0
    assert "draft contributes nothing" in pooled.warnings[0]
    assert not acceptance([of_walks(0, 1)]).warnings


def test_plain_decoding_drafts_nothing_and_is_not_blamed_for_it() -> None:
    pooled = acceptance([of_walks(0, 0, num_drafts=0)])
    assert pooled.acceptance_length == 1.0
    assert pooled.warnings == ("nothing was drafted: this is plain decoding",)


def test_rate_falls_with_the_budget_while_the_length_does_not() -> None:
    small, large = acceptance([of_walks(8, num_drafts=16)]), acceptance([of_walks(8, num_drafts=64)])
    assert small.acceptance_length == large.acceptance_length == 9.0
    assert (small.draft_acceptance_rate, large.draft_acceptance_rate) == (0.5, 0.125)


def test_depth_survival_starts_at_depth_1_and_adds_up_to_the_length() -> None:
    pooled = acceptance([of_walks(0, 3), of_walks(1, 1)])
    assert pooled.depth_survival == (0.75, 0.25, 0.25)
    assert 1 + sum(pooled.depth_survival) == pooled.acceptance_length
    assert depth_survival([of_walks(0, 0)]) == ()


def test_depth_survival_is_none_unless_every_request_gave_its_histogram() -> None:
    assert depth_survival([of_walks(1), of_walks(1, accepted_histogram=None)]) is None
    assert depth_survival([]) is None


def test_without_counts_there_is_a_reason_and_no_number() -> None:
    unknown = RequestRecord(request_id="r", prompt_id="p", output_tokens=9)
    pooled = acceptance([unknown])
    assert (pooled.acceptance_length, pooled.num_verify_steps, pooled.depth_survival) == (None, None, None)
    assert "no request told" in (pooled.reason or "")
    assert "because" in (acceptance([unknown], {}, "because").reason or "")
    none_ran = acceptance([of_walks(num_drafts=None, accepted_histogram=None)])
    assert none_ran.acceptance_length is None
    assert "no verify step ran" in (none_ran.reason or "")


def test_steps_alone_give_a_lower_bound_from_output_tokens() -> None:
    pooled = acceptance([of_walks(3, 3, num_accepted=None, accepted_histogram=None)])
    assert (pooled.acceptance_length, pooled.source) == (4.0, "output_tokens")
    assert "lower bound" in pooled.warnings[0]


def test_failed_requests_do_not_count_and_silent_ones_are_told() -> None:
    failed = of_walks(9, 9, outcome="error", error_kind="truncated")
    silent = RequestRecord(request_id="r", prompt_id="p", output_tokens=9)
    pooled = acceptance([failed, silent, of_walks(1, 1)])
    assert (pooled.acceptance_length, pooled.num_requests) == (2.0, 1)
    assert "only 1 of 2" in pooled.warnings[0]


def test_request_counts_win_over_counters() -> None:
    pooled = acceptance([of_walks(1, 1)], {"num_verify_steps": 10, "num_accepted": 90})
    assert (pooled.acceptance_length, pooled.source) == (2.0, "accepted")


def test_acceptance_length_of_one_request() -> None:
    assert request_acceptance_length(of_walks(0, 3, 15)) == 7.0
    assert request_acceptance_length(of_walks()) is None


def test_tokens_of_counters_give_a_lower_bound_and_say_so() -> None:
    """A server that counts steps and tokens and no accepted ones: what stop and length cut is missing."""
    pooled = acceptance([], {"num_verify_steps": 10, "output_tokens": 54, "num_requests": 4})
    assert pooled.acceptance_length == 1 + (54 - 4 - 10) / 10
    assert any("lower bound" in warning for warning in pooled.warnings)
    assert not acceptance([], {"num_verify_steps": 10, "num_accepted": 40}).warnings


def test_counters_that_hold_other_traffic_are_told() -> None:
    silent = RequestRecord(request_id="r", prompt_id="p", output_tokens=9)
    counters = {"num_verify_steps": 10, "num_accepted": 40, "num_requests": 7}
    assert any("other traffic" in warning for warning in acceptance([silent] * 2, counters).warnings)
    assert not acceptance([silent] * 7, counters).warnings


def test_acceptance_is_told_by_context_length_and_a_drop_by_half_is_flagged() -> None:
    lengths = {500: (6, 6), 1024: (6, 6), 5000: (5, 3), 30_000: (2, 1), 40_000: (0, 1)}
    records = [of_walks(*accepted, prompt_tokens=tokens) for tokens, accepted in lengths.items()]
    pooled = acceptance_by_context([*records, of_walks(9)])
    assert {name: one.acceptance_length for name, one in pooled.items()} == {
        "up to 1K prompt tokens": 7.0,
        "1K to 8K prompt tokens": 5.0,
        "8K to 32K prompt tokens": 2.5,
        "over 32K prompt tokens": 1.5,
    }
    told = context_warnings(pooled)
    assert ["8K to 32K" in told[0], "over 32K" in told[1]] == [True, True]
    assert len(told) == 2, "4 of 6 drafts is no drop by half"
