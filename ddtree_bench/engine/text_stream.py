"""Text of one request as it grows: whole characters only, stop strings found and cut, partial matches held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """What turns tokens into text; `ddtree_bench.models.tokenizer.Detokenizer` does."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Hold the text that is not handed out yet.

    Args:
        detokenizer: None where no text is wanted; then everything is empty.
        stop: strings that end the text; none of them is ever handed out, whole or in part.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._pending = ""

    def push(self, token: int) -> str | None:
        """Add a token; return the stop string it completes, the text from there on being dropped."""
        if self._detokenizer is None:
            return None
        self._pending += self._detokenizer.push([token])
        return self._cut()

    def take(self) -> str:
        """Return the text that no later token can turn into a stop string."""
        safe = len(self._pending) - self._held_back()
        text, self._pending = self._pending[:safe], self._pending[safe:]
        return text

    def drain(self) -> str:
        """Return all that is left, an unfinished character included; the text has ended."""
        if self._detokenizer is not None:
            self._pending += self._detokenizer.flush()
            self._cut()
        text, self._pending = self._pending, ""
        return text

    def drop_unfinished(self) -> str:
        """Return what is left without an unfinished character: the text was cut by a stop string."""
        text, self._pending = self._pending, ""
        return text

    def _cut(self) -> str | None:
        found = [(at, order) for order, stop in enumerate(self._stop) if (at := self._pending.find(stop)) >= 0]
        if not found:
            return None
        at, order = min(found)
        self._pending = self._pending[:at]
        return self._stop[order]

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest
