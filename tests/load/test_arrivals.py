"""Schedules: absolute, seeded, and of the asked rate and shape."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddtree_bench.config import LoadSpec
from ddtree_bench.load.arrivals import open_loop_offsets, schedule_of


def gaps(**options: float) -> np.ndarray:
    return np.diff(open_loop_offsets(20_001, request_rate=50.0, seed=3, **options))  # type: ignore[arg-type]


def variation(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


@pytest.mark.parametrize(("burstiness", "expected"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_shape(burstiness: float, expected: float) -> None:
    values = gaps(burstiness=burstiness)
    assert values.mean() == pytest.approx(1 / 50, rel=0.05)
    assert variation(values) == pytest.approx(expected, rel=0.05)


def test_infinite_burstiness_is_constant() -> None:
    assert open_loop_offsets(4, request_rate=2.0, burstiness=math.inf) == (0.0, 0.5, 1.0, 1.5)


def test_first_is_at_0_and_offsets_ascend() -> None:
    offsets = open_loop_offsets(100, request_rate=10.0, seed=1)
    assert offsets[0] == 0.0
    assert list(offsets) == sorted(offsets)


def test_one_seed_gives_one_schedule() -> None:
    assert open_loop_offsets(9, request_rate=1.0, seed=5) == open_loop_offsets(9, request_rate=1.0, seed=5)
    assert open_loop_offsets(9, request_rate=1.0, seed=5) != open_loop_offsets(9, request_rate=1.0, seed=6)


@pytest.mark.parametrize("num", [0, 1])
def test_few_requests(num: int) -> None:
    assert open_loop_offsets(num, request_rate=1.0) == (0.0,) * num


@pytest.mark.parametrize("options", [{"request_rate": 0.0}, {"request_rate": math.inf}, {"request_rate": 1.0, "burstiness": 0.0}])
def test_bad_values_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="given"):
        open_loop_offsets(3, **options)


def test_schedule_of_a_spec() -> None:
    closed = schedule_of(LoadSpec(num_prompts=3, max_concurrency=2))
    assert (closed.is_open_loop, closed.max_concurrency, closed.num_requests) == (False, 2, 3)
    assert schedule_of(LoadSpec(num_prompts=3)).max_concurrency == 1
    opened = schedule_of(LoadSpec(num_prompts=3, request_rate=2.0, burstiness=math.inf, max_concurrency=1))
    assert (opened.offsets_s, opened.max_concurrency) == ((0.0, 0.5, 1.0), 1)
