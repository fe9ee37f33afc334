"""Distinct n-grams show a text that loops."""

from __future__ import annotations

import pytest

from ddtree_bench.metrics.distinct import distinct_ngram_share


def test_loop_and_no_loop() -> None:
    assert distinct_ngram_share(["a b c d e f g"]) == 1.0
    assert distinct_ngram_share(["a b " * 50]) == pytest.approx(2 / 97)


def test_pooled_over_texts_and_not_across_them() -> None:
    assert distinct_ngram_share(["a b c d", "a b c d"]) == 0.5
    assert distinct_ngram_share(["a b", "c d"]) is None


def test_characters() -> None:
    assert distinct_ngram_share(["aaaaa"], n=4, unit="character") == 0.5
    with pytest.raises(ValueError, match="unit must be one of"):
        distinct_ngram_share(["a"], unit="token")
