"""When requests are sent: the whole schedule, computed before the start as absolute offsets from it.

Closed loop: as many requests in flight as the concurrency allows, each sent when a slot is free. Open loop: gaps drawn once,
constant, Poisson or gamma, and never stretched by a slow server (a delay added after each send would drift).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ddtree_bench.config import LoadSpec


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When each request of a load is due.

    `offsets_s` are seconds from the start of the measured load, ascending; None means closed loop: due when a slot is free.
    `max_concurrency` caps the requests in flight; None is no cap. In an open loop a request that the cap holds back keeps its
    planned time, so that the wait is seen.
    """

    num_requests: int
    offsets_s: tuple[float, ...] | None
    max_concurrency: int | None

    @property
    def is_open_loop(self) -> bool:
        """Whether requests are due by the clock."""
        return self.offsets_s is not None


def open_loop_offsets(num_requests: int, *, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> tuple[float, ...]:
    """Draw when each request is due; the first at 0.

    Gaps are gamma distributed with shape = burstiness and mean 1 / request_rate: 1 is Poisson, below 1 burstier, above 1
    more regular, infinity constant.

    Args:
        num_requests: how many.
        request_rate: requests a second.
        burstiness: shape of the gamma distribution, greater than 0; math.inf gives constant gaps.
        seed: one seed gives one schedule.

    Returns:
        Offsets from the start in seconds, ascending.
    """
    if not math.isfinite(request_rate) or request_rate <= 0:
        raise ValueError(f"request_rate must be finite and greater than 0 requests/s; given {request_rate!r}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be greater than 0; given {burstiness!r}; inf gives constant gaps, 1 Poisson")
    if math.isinf(burstiness):
        return tuple(i / request_rate for i in range(num_requests))
    random = np.random.default_rng(seed)
    gaps_s = random.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=max(num_requests - 1, 0))
    return tuple(float(offset) for offset in np.concatenate([[0.0], np.cumsum(gaps_s)])[:num_requests])


def schedule_of(spec: LoadSpec) -> Schedule:
    """Return the schedule of a load; with neither max_concurrency nor request_rate it is a closed loop of one request."""
    if spec.request_rate is None:
        return Schedule(num_requests=spec.num_prompts, offsets_s=None, max_concurrency=spec.max_concurrency or 1)
    offsets_s = open_loop_offsets(spec.num_prompts, request_rate=spec.request_rate, burstiness=spec.burstiness, seed=spec.seed)
    return Schedule(num_requests=spec.num_prompts, offsets_s=offsets_s, max_concurrency=spec.max_concurrency)
