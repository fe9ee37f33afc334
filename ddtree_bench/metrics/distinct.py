"""Share of distinct n-grams: a text that loops accepts drafts too well and flatters acceptance."""

from __future__ import annotations

from collections.abc import Iterable

_UNITS = ("word", "character")


def distinct_ngram_share(texts: Iterable[str], *, n: int = 4, unit: str = "word") -> float | None:
    """Return distinct n-grams / n-grams, pooled over texts; an n-gram does not reach over two texts.

    Args:
        texts: outputs.
        n: tokens in an n-gram.
        unit: word (split at white space) or character.

    Returns:
        A share from 0 to 1, or None where no text is n tokens long.
    """
    if unit not in _UNITS:
        raise ValueError(f"unit must be one of {', '.join(_UNITS)}; given {unit!r}")
    seen: set[tuple[str, ...]] = set()
    total = 0
    for text in texts:
        tokens = text.split() if unit == "word" else list(text)
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        seen.update(grams)
        total += len(grams)
    return len(seen) / total if total else None
