"""What a reply's bytes become in the record: error kinds, choices, counts, and the two places of speculation counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddtree_bench.load.recorder import StreamRecorder
from ddtree_bench.metrics.latency import tpot_ms, ttft_ms
from ddtree_bench.records import RequestRecord

DONE = b"data: [DONE]\n\n"


def event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def chat(delta: dict[str, Any], *, finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": finish}], **more})


def native(text: str, tokens: int, finish: dict[str, Any] | None = None, **meta: Any) -> bytes:
    return event({"text": text, "meta_info": {"completion_tokens": tokens, "prompt_tokens": 4, "finish_reason": finish, **meta}})


def record(*packets: bytes, endpoint: str = "chat") -> RequestRecord:
    """Feed packets 10 ms apart, the first at 10 ms."""
    recorder = StreamRecorder(endpoint, sent_s=0.0)
    for number, data in enumerate(packets, start=1):
        recorder.feed(number / 100, data)
    return recorder.finish((len(packets) + 1) / 100)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "empty"),
        (b": ping\n\n", "empty"),
        (DONE, "empty"),
        (b"<html><body>502</body></html>", "protocol"),
        (b"data: {broken\n\n", "protocol"),
        (b"data: [1]\n\n", "protocol"),
        (b'{"choices": []}', "protocol"),
        (b'{"error": {"message": "busy"}}', "server"),
        (b'{"object": "error", "message": "busy"}', "server"),
        (b"event: error\ndata: busy\n\n", "server"),
        (event({"error": "busy"}), "server"),
        (event({"error": {"message": "busy"}}) + DONE, "server"),
        (chat({"content": "a"}, finish="abort"), "server"),
        (b'data: {"choices": [{"ind', "truncated"),
        (chat({"content": "a"}), "truncated"),
        (chat({"content": "a"}) + b'data: {"choices": [{"ind', "truncated"),
    ],
)
def test_error_kind(body: bytes, kind: str) -> None:
    given = record(body) if body else record()
    assert (given.outcome, given.error_kind) == ("error", kind)
    assert given.error_message


@pytest.mark.parametrize(
    "body",
    [
        chat({"content": "a"}, finish="stop"),
        chat({"content": "a"}) + DONE,
        chat({"content": "a"}) + event({"choices": [], "usage": {"completion_tokens": 1}}),
        chat({"content": "a"}, finish="stop") + b'data: {"choices": [{"ind',
    ],
)
def test_any_of_finish_usage_or_done_ends_a_reply(body: bytes) -> None:
    assert record(body).outcome == "ok"


def test_running_usage_does_not_end_a_reply() -> None:
    cut = record(chat({"content": "a"}, usage={"completion_tokens": 1}), chat({"content": "b"}, usage={"completion_tokens": 2}))
    assert cut.error_kind == "truncated"


def test_nothing_after_done_counts() -> None:
    given = record(chat({"content": "a"}, finish="stop") + DONE, event({"error": "late"}), chat({"content": "late"}))
    assert (given.outcome, given.text, given.done_s) == ("ok", "a", 0.01)


def test_transport_error_after_done_is_no_error() -> None:
    recorder = StreamRecorder("chat", sent_s=0.0)
    recorder.feed(0.01, chat({"content": "a"}) + DONE)
    assert recorder.fail("truncated", "broken", 0.02).outcome == "ok"


def test_transport_error_inside_the_reply() -> None:
    recorder = StreamRecorder("chat", sent_s=0.0)
    recorder.feed(0.01, chat({"content": "a"}))
    given = recorder.fail("timeout", "too long", 0.5)
    assert (given.error_kind, given.error_message, given.text, given.done_s) == ("timeout", "too long", "a", 0.5)


def test_reply_of_tool_calls_alone_is_ok_and_has_a_first_token() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": ""}}]
    given = record(
        chat({"role": "assistant", "tool_calls": []}), chat({"tool_calls": call}), chat({}, finish="tool_calls") + DONE
    )
    assert (given.outcome, given.text, ttft_ms(given)) == ("ok", "", pytest.approx(20))


def test_choice_0_is_recorded_and_tokens_of_all_choices_are_not_its_own() -> None:
    given = record(
        chat({"content": "b"}, index=1), chat({"content": "a"}), event({"choices": [], "usage": {"completion_tokens": 9}}) + DONE
    )
    assert (given.text, given.output_tokens, given.token_source) == ("a", None, None)
    assert ttft_ms(given) == pytest.approx(20)
    assert "choice 0" in given.warnings[0]


def test_both_names_of_reasoning_are_one_reasoning() -> None:
    delta = {"reasoning": "hm", "reasoning_content": "hm"}
    given = record(chat(delta), chat({"reasoning": " so"}), chat({"content": "42"}, finish="stop"))
    assert (given.reasoning, given.text) == ("hm so", "42")
    assert (given.first_token_s, given.first_answer_s) == (0.01, 0.03)


def test_completions_text() -> None:
    body = event({"choices": [{"index": 0, "text": "ab", "finish_reason": "length"}]}) + DONE
    given = record(body, endpoint="completions")
    assert (given.text, given.finish_reason) == ("ab", "length")


def test_usage_on_the_last_content_chunk_alone_is_no_running_count() -> None:
    given = record(chat({"content": "a"}), chat({"content": "b"}, usage={"completion_tokens": 8}, finish="stop"))
    assert (given.output_tokens, [tokens for _, tokens in given.chunks]) == (8, [None, None])
    assert tpot_ms(given) is None


def test_generate_text_is_cumulative_and_counts_are_running() -> None:
    given = record(
        native("a", 1), native("abcd", 5), native("abcdef", 9, {"type": "length", "length": 9}) + DONE, endpoint="generate"
    )
    assert (given.text, given.output_tokens, given.prompt_tokens, given.finish_reason) == ("abcdef", 9, 4, "length")
    assert [tokens for _, tokens in given.chunks] == [1, 4, 4]
    assert tpot_ms(given) == pytest.approx(20 / 8)


def test_generate_text_trimmed_at_the_end() -> None:
    given = record(native("ab STO", 3), native("ab", 4, {"type": "stop", "matched": "STOP"}), endpoint="generate")
    assert (given.text, given.output_tokens, given.outcome) == ("ab", 4, "ok")


def test_generate_increments() -> None:
    given = record(native("ab", 1), native("cd", 2), native("", 2, {"type": "stop"}), endpoint="generate")
    assert given.text == "abcd"


def test_generate_abort_is_a_server_error() -> None:
    given = record(native("a", 1), native("a", 1, {"type": "abort", "message": "out of memory"}), endpoint="generate")
    assert (given.error_kind, given.error_message) == ("server", "out of memory")


SGLANG = {
    "spec_verify_ct": 3,
    "spec_num_correct_drafts": 6,
    "spec_num_proposed_drafts": 45,
    "spec_correct_drafts_histogram": [1, 0, 0, 2],
    "num_cut": 1,
}


@pytest.mark.parametrize(
    "last",
    [
        event({"choices": [], "usage": {"completion_tokens": 9}, "meta_info": SGLANG}),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "meta_info": SGLANG}]}),
        event({"choices": [], "sglext": {"spec_tokens_details": SGLANG}}),
    ],
    ids=["top", "choice", "sglext"],
)
def test_sglang_counts(last: bytes) -> None:
    given = record(chat({"content": "a"}), last + DONE)
    assert (given.num_verify_steps, given.num_accepted, given.num_draft_tokens, given.num_cut) == (3, 6, 45, 1)
    assert given.accepted_histogram == [1, 0, 0, 2]


def test_vllm_counts() -> None:
    counts = {
        "mean_acceptance_length": 53 / 43,
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
    }
    given = record(chat({"content": "a"}), event({"choices": [], "metrics": {"speculative_decoding": counts}}) + DONE)
    assert (given.num_verify_steps, given.num_accepted, given.num_draft_tokens) == (43, 10, 129)
    assert given.accepted_histogram == [39, 1, 0, 3]


@pytest.mark.parametrize("histogram", [[1, 1], [1, 0, 0, 3], [1, None, 2], [1, -1, 0, 3]])
def test_histogram_that_does_not_add_up_is_left_out_with_a_warning(histogram: list[Any]) -> None:
    given = record(
        native("a", 9, {"type": "stop"}, **{**SGLANG, "spec_correct_drafts_histogram": histogram}), endpoint="generate"
    )
    assert given.accepted_histogram is None
    assert (given.num_verify_steps, given.num_accepted) == (3, 6)
    assert "histogram" in given.warnings[0]


def test_counts_that_are_none_stay_unknown() -> None:
    meta = {"spec_verify_ct": float("nan"), "spec_num_correct_drafts": "six"}
    given = record(native("a", 9, {"type": "stop"}, **meta), endpoint="generate")
    assert (given.num_verify_steps, given.num_accepted, len(given.warnings)) == (None, None, 2)


def test_refusal_keeps_the_servers_words() -> None:
    given = StreamRecorder("chat", sent_s=0.0).refuse(429, b'{"error": {"message": "slow down"}}', 0.1)
    assert (given.error_kind, given.error_message, given.done_s) == ("http_429", "slow down", 0.1)
    assert StreamRecorder("chat").refuse(500, b"", 0.1).error_message == "HTTP 500 with an empty body"
