"""The bootstrap resamples prompts, is seeded, and covers what it says."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_bench.metrics.intervals import bootstrap_mean, bootstrap_ratio


def test_one_seed_gives_one_interval() -> None:
    values, names = [float(i * i) for i in range(30)], [str(i) for i in range(30)]
    assert bootstrap_mean(values, names, seed=1) == bootstrap_mean(values, names, seed=1)
    assert bootstrap_mean(values, names, seed=1) != bootstrap_mean(values, names, seed=2)


def test_repeats_of_a_prompt_do_not_narrow_it() -> None:
    random = np.random.default_rng(0)
    values = list(random.normal(10, 2, 20))
    once = bootstrap_mean(values, [str(i) for i in range(20)])
    repeated = bootstrap_mean(values * 10, [str(i) for i in range(20)] * 10)
    assert once is not None
    assert repeated is not None
    assert repeated.high - repeated.low == pytest.approx(once.high - once.low, rel=1e-6)


def test_interval_of_a_constant_ratio_is_a_point() -> None:
    interval = bootstrap_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], ["a", "b", "c"])
    assert interval == (2.0, 2.0)


def test_coverage_of_the_mean() -> None:
    random = np.random.default_rng(7)
    names = [str(i) for i in range(40)]
    hits = 0
    for seed in range(100):
        interval = bootstrap_mean(list(random.normal(5, 1, 40)), names, seed=seed)
        assert interval is not None
        hits += interval.low <= 5 <= interval.high
    assert 88 <= hits <= 100


@pytest.mark.parametrize("names", [[], ["a"], ["a", "a"]])
def test_fewer_than_two_prompts_have_no_interval(names: list[str]) -> None:
    assert bootstrap_mean([1.0] * len(names), names) is None


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="as long as"):
        bootstrap_ratio([1.0], [1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match="level"):
        bootstrap_mean([1.0], ["a"], level=95)
