"""The decoder by the standard, and its one exception at the end of the stream."""

from __future__ import annotations

import pytest

from ddtree_bench.load.sse import SseDecoder

STREAM = (
    b"\xef\xbb\xbf: comment\r\n\r\ndata: a\ndata:b\n\nevent: error\rdata: c\r\rid: 7\nretry: 10\nunknown: x\ndata\n\n"
    b"event: only\n\ndata:  two spaces \r\n\r\n" + "data: 数🙂\n\n".encode()
)
EVENTS = [("message", "a\nb"), ("error", "c"), ("message", ""), ("message", " two spaces "), ("message", "数🙂")]


def test_line_ends_comments_fields_and_byte_order_mark() -> None:
    assert SseDecoder().feed(STREAM) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_any_split_gives_the_same_events(size: int) -> None:
    decoder = SseDecoder()
    events = [event for i in range(0, len(STREAM), size) for event in decoder.feed(STREAM[i : i + size])]
    assert events == EVENTS
    assert decoder.finish() is None


def test_carriage_return_ends_an_event_before_its_line_feed_comes() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [("message", "a")]
    assert decoder.feed(b"\ndata: b\r\n\r\n") == [("message", "b")]


@pytest.mark.parametrize("tail", [b"data: last", b"data: last\n", b"data: last\r"])
def test_event_without_blank_line_is_given_at_the_end(tail: bytes) -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: first\n\n" + tail) == [("message", "first")]
    assert decoder.finish() == ("message", "last")


def test_long_line_in_many_packets() -> None:
    decoder = SseDecoder()
    for _ in range(1000):
        assert decoder.feed(b"") == []
    assert decoder.feed(b"data: ") == []
    for _ in range(1000):
        assert decoder.feed(b"x" * 10) == []
    assert decoder.feed(b"\n\n") == [("message", "x" * 10_000)]
