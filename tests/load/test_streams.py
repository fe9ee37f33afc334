"""Every stream of cases/streams.json, its bytes cut in two at every position, gives the record that the case asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_bench.load.recorder import StreamRecorder
from ddtree_bench.metrics import latency
from ddtree_bench.records import RequestRecord

CASES = json.loads((Path(__file__).parents[1] / "cases" / "streams.json").read_text(encoding="utf-8"))


def record_of(case: dict[str, Any], packets: list[tuple[float, bytes]]) -> RequestRecord:
    recorder = StreamRecorder("chat", planned_s=0.0, sent_s=0.0)
    if case["http_status"] != 200:
        return recorder.refuse(case["http_status"], b"".join(data for _, data in packets), packets[-1][0])
    for t_s, data in packets:
        recorder.feed(t_s, data)
    return recorder.finish(packets[-1][0])


def check(record: RequestRecord, expect: dict[str, Any]) -> None:
    assert record.outcome == expect["outcome"]
    assert record.error_kind == expect.get("kind")
    if "message_contains" in expect:
        assert expect["message_contains"] in (record.error_message or "")
    for name in ("text", "reasoning", "output_tokens"):
        if name in expect:
            assert getattr(record, name) == expect[name]
    for name, function in (
        ("ttft_ms", latency.ttft_ms),
        ("ttfa_ms", latency.ttfa_ms),
        ("tpot_ms", latency.tpot_ms),
        ("e2e_ms", latency.e2e_ms),
    ):
        if name in expect:
            value = function(record)
            assert value == (None if expect[name] is None else pytest.approx(expect[name]))
    if "content_chunks" in expect:
        assert len(record.chunks) == expect["content_chunks"]
    if "itl_ms" in expect:
        assert latency.itl_ms(record) == pytest.approx(expect["itl_ms"])
    if "tokens_per_chunk" in expect:
        assert [tokens for _, tokens in record.chunks] == expect["tokens_per_chunk"]


def packets_of(case: dict[str, Any]) -> list[tuple[float, bytes]]:
    return [(packet["t_ms"] / 1000, bytes.fromhex(packet["hex"])) for packet in case["packets"]]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_stream(case: dict[str, Any]) -> None:
    check(record_of(case, packets_of(case)), case["expect"])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_stream_split_at_every_position(case: dict[str, Any]) -> None:
    """A packet cut in two, both halves stamped alike, changes nothing; neither does one byte at a time."""
    packets = packets_of(case)
    for number, (t_s, data) in enumerate(packets):
        for cut in range(1, len(data)):
            split = [*packets[:number], (t_s, data[:cut]), (t_s, data[cut:]), *packets[number + 1 :]]
            check(record_of(case, split), case["expect"])
    check(record_of(case, [(t_s, bytes([byte])) for t_s, data in packets for byte in data]), case["expect"])


def test_four_tokens_a_chunk_without_counts_has_no_tpot() -> None:
    case = next(case for case in CASES if case["name"] == "four tokens a chunk")
    assert latency.tpot_ms(record_of(case, packets_of(case))) is None
