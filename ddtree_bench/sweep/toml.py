"""Writes the flat TOML of this project's files: tables of scalars, lists and one level of sub-tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_toml(tables: Mapping[str, Mapping[str, Any]], *, comment: str = "") -> str:
    """Return tables as TOML text; None values are left out, as TOML has none."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for name, table in tables.items():
        lines += ([""] if lines else []) + [f"[{name}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"a TOML value must be a scalar, a list or a table; given {value!r}")
