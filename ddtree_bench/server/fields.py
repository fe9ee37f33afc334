"""Reads a JSON body field by field; every answer to a bad field names it, what must hold and what was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_bench.server.errors import ApiError


class Fields:
    """The fields of one JSON object; remembers which were read, so that the rest can be told to the client.

    A field that is null counts as not given.
    """

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, Mapping):
            raise ApiError(f"{where or 'the body'} must be a JSON object; given {show(body)}", param=where or None)
        self.body = body
        self.where = where
        self.read: set[str] = set()

    def take(self, name: str) -> Any:
        """Return the field's value, None when it is absent or null."""
        self.read.add(name)
        return self.body.get(name)

    def unread(self) -> tuple[str, ...]:
        """Return the names of given fields that nobody read."""
        return tuple(sorted(name for name, value in self.body.items() if name not in self.read and value is not None))

    def error(self, name: str, must: str, given: Any, do: str = "") -> ApiError:
        """Return the error for a bad value of a field."""
        path = self.path(name)
        return ApiError(f"{path} must be {must}; given {show(given)}" + (f"; {do}" if do else ""), param=path)

    def path(self, name: str) -> str:
        """Return the field's name as the client sees it in the whole body."""
        return f"{self.where}.{name}" if self.where else name

    def integer(self, name: str, default: int | None = None, minimum: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if not is_integer(value) or (minimum is not None and value < minimum):
            raise self.error(name, "an integer" + ("" if minimum is None else f" of at least {minimum}"), value)
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
            raise self.error(name, "a finite number", value)
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(name, "a string that is not empty", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a string or a list of strings as a tuple."""
        value = self.take(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
            raise self.error(name, "a string or a list of strings, none of them empty", value)
        return tuple(values)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.take(name)
        if value is None:
            return ()
        if not is_token_list(value):
            raise self.error(name, "a list of integers", value)
        return tuple(value)

    def refuse(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Answer 400 to every field of the table that has another value than null or one of its neutral ones."""
        for name, neutral in table.items():
            value = self.take(name)
            if value is not None and value not in neutral:
                allowed = " or ".join([*(show(item) for item in neutral), "left out"])
                raise ApiError(
                    f"{self.path(name)} is not supported: it must be {allowed}; given {show(value)}",
                    param=self.path(name),
                    code="unsupported",
                )


def is_integer(value: Any) -> bool:
    """True for a JSON integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_list(value: Any) -> bool:
    """True for a list of JSON integers."""
    return isinstance(value, list) and all(is_integer(token) for token in value)


def show(value: Any, limit: int = 80) -> str:
    """Return a value as it stands in an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
