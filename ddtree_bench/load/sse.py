"""Incremental decoder of server-sent events.

Follows the WHATWG HTML standard, section 9.2 (event stream interpretation), with one exception: an event that is whole but
lacks its closing blank line is given at the end of the stream, because servers close their connection without it.
"""

from __future__ import annotations

from typing import NamedTuple

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One event: its type ("message" where the stream names none) and its data lines joined by newline."""

    event: str
    data: str


class SseDecoder:
    """Turns bytes, split anywhere, into events. Line ends may be LF, CR LF or CR; comments and unknown fields are skipped."""

    def __init__(self) -> None:
        self._partial: list[bytes] = []  # pieces of a line whose end has not come yet
        self._is_after_cr = False  # the last byte seen was a CR: an LF that follows belongs to it
        self._is_first_line = True
        self._event = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[SseEvent]:
        """Take the next bytes; return the events that they complete."""
        if self._is_after_cr and data:
            if data[:1] == b"\n":
                data = data[1:]
            self._is_after_cr = False
        if not data:
            return []
        lines = data.splitlines(keepends=True)
        last = lines.pop() if not data.endswith((b"\n", b"\r")) else None
        self._is_after_cr = data.endswith(b"\r")
        events = [event for line in lines if (event := self._take_line(line.rstrip(b"\r\n"))) is not None]
        if last is not None:
            self._partial.append(last)
        return events

    def finish(self) -> SseEvent | None:
        """Return the event left at the end of the stream, if it holds data."""
        if self._partial:
            self._take_line(b"")
        return self._dispatch()

    def _take_line(self, end: bytes) -> SseEvent | None:
        self._partial.append(end)
        line = b"".join(self._partial)
        self._partial.clear()
        if self._is_first_line:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._is_first_line = False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", errors="replace"))
        elif name == b"event":
            self._event = value.removeprefix(b" ").decode("utf-8", errors="replace")
        return None

    def _dispatch(self) -> SseEvent | None:
        event, self._event = self._event or "message", ""
        if not self._data:
            return None
        data, self._data = "\n".join(self._data), []
        return SseEvent(event, data)
