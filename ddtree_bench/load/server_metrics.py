"""Reads a server's Prometheus counters before and after a load and takes their difference.

Only differences over the window count: lifetime averages hold warm-up and other traffic, and a flush resets them. A server
whose metrics are missing or foreign is no error; the reason is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

# our name -> the counter in vLLM's dialect, SGLang's
COUNTERS = {
    "num_verify_steps": ("vllm:spec_decode_num_drafts_total", "sglang:spec_verify_calls_total"),
    "num_accepted": ("vllm:spec_decode_num_accepted_tokens_total", None),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens_total", None),
    "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "num_requests": ("vllm:request_success_total", "sglang:num_requests_total"),
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counters at one moment, or their difference; a missing one is absent. `reason` says why there are none."""

    values: Mapping[str, float] = field(default_factory=dict)
    accepted_per_position: Mapping[int, float] = field(default_factory=dict)
    reason: str | None = None


def parse_counters(text: str) -> Counters:
    """Read Prometheus text; samples of one counter (ranks, engines) are added up."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
                if sample.name == _PER_POSITION and sample.labels.get("position", "").isdigit():
                    position = int(sample.labels["position"])
                    positions[position] = positions.get(position, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as error:
        return Counters(reason=f"/metrics must be Prometheus text; {error}")
    found = {ours: [totals[name] for name in names if name in totals] for ours, names in COUNTERS.items()}
    values = {ours: totals_of[0] for ours, totals_of in found.items() if totals_of}  # a server of both dialects counts once
    if not values:
        return Counters(reason="/metrics has no counter of vLLM's or SGLang's names")
    return Counters(values=values, accepted_per_position=positions)


def difference(before: Counters, after: Counters) -> Counters:
    """Return after − before of the counters that both hold; a counter that fell was reset, which is a reason and no number."""
    for side, counters in (("before", before), ("after", after)):
        if counters.reason is not None:
            return Counters(reason=f"{side} the load: {counters.reason}")
    shared = before.values.keys() & after.values.keys()
    if not shared:
        return Counters(reason="the counters of before and after the load have no name in common: unavailable")
    fallen = sorted(name for name in shared if after.values[name] < before.values[name])
    if fallen:
        return Counters(reason=f"the server reset its counters during the load ({', '.join(fallen)} fell)")
    return Counters(
        values={name: after.values[name] - before.values[name] for name in sorted(shared)},
        accepted_per_position={
            position: total - before.accepted_per_position.get(position, 0.0)
            for position, total in sorted(after.accepted_per_position.items())
        },
    )


async def scrape(session: aiohttp.ClientSession, root: str, *, timeout_s: float = 10.0) -> Counters:
    """Read GET /metrics; never raises for a server without them."""
    try:
        async with asyncio.timeout(timeout_s), session.get(root + "/metrics") as response:
            if response.status != 200:
                return Counters(reason=f"GET /metrics answered HTTP {response.status}")
            return parse_counters(await response.text(errors="replace"))
    except TimeoutError:
        return Counters(reason=f"GET /metrics did not answer within {timeout_s:g} s")
    except (aiohttp.ClientError, ConnectionError) as error:
        return Counters(reason=f"GET /metrics failed: {error}")
