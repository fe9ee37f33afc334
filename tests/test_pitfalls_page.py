"""docs/pitfalls.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def named_tests() -> list[tuple[str, str | None]]:
    """Return (file, test or None) of every name in the page; "…" stands for the file named before it."""
    found, file = [], ""
    for path, test in re.findall(
        r"`(tests/[\w/]+\.py|…)(?:::(\w+))?`", (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    ):
        file = file if path == "…" else path
        found.append((file, test or None))
    return found


def test_every_test_that_the_page_names_is_there() -> None:
    names = named_tests()
    assert len(names) > 60
    missing = [
        f"{file}::{test}"
        for file, test in names
        if not (ROOT / file).exists() or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert missing == []
