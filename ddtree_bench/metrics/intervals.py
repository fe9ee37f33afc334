"""Bootstrap intervals over prompts: a prompt is drawn with all of its requests, since repeats of a prompt are not independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_DRAWS_AT_ONCE = 256


class Interval(NamedTuple):
    """Low and high end of an interval."""

    low: float
    high: float


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    clusters: Sequence[str],
    *,
    seed: int = 0,
    level: float = 0.95,
    num_draws: int = 2000,
) -> Interval | None:
    """Return the percentile interval of Σ numerators / Σ denominators under resampling of clusters.

    Args:
        numerators, denominators: one value a request, e.g. accepted tokens and verify steps.
        clusters: each request's prompt.
        seed: one seed gives one interval.
        level: coverage, between 0 and 1.
        num_draws: resamples.

    Returns:
        The interval, or None with fewer than two clusters.
    """
    if not len(numerators) == len(denominators) == len(clusters):
        raise ValueError(
            "numerators, denominators and clusters must be as long as each other; "
            f"given {len(numerators)}, {len(denominators)}, {len(clusters)}"
        )
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; given {level!r}")
    names, index = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    if len(names) < 2:
        return None
    top = np.bincount(index, weights=np.asarray(numerators, dtype=np.float64))
    bottom = np.bincount(index, weights=np.asarray(denominators, dtype=np.float64))
    random = np.random.default_rng(seed)
    ratios: list[np.ndarray] = []
    for first in range(0, num_draws, _DRAWS_AT_ONCE):
        drawn = random.integers(0, len(names), size=(min(_DRAWS_AT_ONCE, num_draws - first), len(names)))
        sums = bottom[drawn].sum(axis=1)
        ratios.append(top[drawn].sum(axis=1)[sums > 0] / sums[sums > 0])
    values = np.concatenate(ratios)
    if values.size == 0:
        return None
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def bootstrap_mean(values: Sequence[float], clusters: Sequence[str], *, seed: int = 0, level: float = 0.95) -> Interval | None:
    """Return the interval of the mean of one value a request, clusters resampled."""
    return bootstrap_ratio(values, [1.0] * len(values), clusters, seed=seed, level=level)
