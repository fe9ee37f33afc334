"""Acceptance: how many tokens a verify step commits, pooled over the measured window.

acceptance_length = 1 + Σ num_accepted / Σ verify steps (the bonus token counted), from per-request counts, else from
differences of the server's counters, else None with the reason. Never from a lifetime average, and never ranked by rate.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddtree_bench.records import RequestRecord


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Pooled acceptance of a set of requests; None where unknown, and `reason` says why.

    acceptance_length counts the bonus token; drafts_per_step is the same without it. request_mean is the unweighted mean of
    the requests' own acceptance lengths, shown beside the pooled one because it can order two arms the other way.
    depth_survival holds, from depth 1 on, the share of steps with num_accepted ≥ d; 1 + its sum is acceptance_length.
    draft_acceptance_rate falls as 1 / budget for trees. source: accepted (counted by the server for each request),
    output_tokens (from a request's tokens and steps, after stop and length cut) or server_counters.
    """

    acceptance_length: float | None = None
    drafts_per_step: float | None = None
    request_mean: float | None = None
    depth_survival: tuple[float, ...] | None = None
    draft_acceptance_rate: float | None = None
    mean_verify_width: float | None = None
    num_verify_steps: int | None = None
    num_accepted: int | None = None
    num_draft_tokens: int | None = None
    num_requests: int = 0
    source: str | None = None
    reason: str | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def accepted_of(record: RequestRecord) -> int | None:
    """Return the draft tokens that one request accepted: as the server counted, else output_tokens − 1 − verify steps."""
    if record.num_verify_steps is None or record.num_accepted is not None:
        return record.num_accepted
    if record.output_tokens is None:
        return None
    return max(record.output_tokens - 1 - record.num_verify_steps, 0)


def request_acceptance_length(record: RequestRecord) -> float | None:
    """Return the acceptance length of one request; None without a verify step or without counts."""
    accepted = accepted_of(record)
    if accepted is None or not record.num_verify_steps:
        return None
    return 1.0 + accepted / record.num_verify_steps


LOWER_BOUND = "accepted tokens are not told: derived from output tokens after stop and length cut, a lower bound"
CONTEXT_EDGES = (1024, 8192, 32768)  # prompt tokens


def acceptance(
    records: Sequence[RequestRecord],
    counters: Mapping[str, float] | None = None,
    reason: str | None = None,
    accepted_per_position: Mapping[int, float] | None = None,
) -> Acceptance:
    """Pool the acceptance of the requests that succeeded.

    Args:
        records: requests of the measured window.
        counters: differences of the server's counters over the window, used where no request told its counts.
        reason: why there are no counters.
        accepted_per_position: the same of the counters by position; position 0 is depth 1.
    """
    ok = [record for record in records if record.outcome == "ok"]
    known = [record for record in ok if accepted_of(record) is not None and record.num_verify_steps is not None]
    if known:
        return _from_requests(known, num_ok=len(ok))
    pooled = _from_counters(counters or {}, reason, accepted_per_position or {})
    counted = (counters or {}).get("num_requests")
    if pooled.acceptance_length is not None and counted is not None and counted > len(records):
        others = (
            f"the server's counters hold {counted:g} requests of which {len(records)} are this load's: other traffic is in them"
        )
        return replace(pooled, warnings=(*pooled.warnings, others))
    return pooled


def acceptance_by_context(records: Sequence[RequestRecord]) -> dict[str, Acceptance]:
    """Pool the acceptance by prompt length, shortest first; lengths that no request has are left out."""
    buckets: dict[int, list[RequestRecord]] = {}
    for record in records:
        if record.prompt_tokens is not None:
            buckets.setdefault(bisect.bisect_left(CONTEXT_EDGES, record.prompt_tokens), []).append(record)
    return {_context_name(index): acceptance(bucket) for index, bucket in sorted(buckets.items())}


def context_warnings(pooled: Mapping[str, Acceptance]) -> list[str]:
    """Return a sentence for each prompt length whose accepted drafts are less than half of the shortest one's."""
    known = [(name, one.drafts_per_step) for name, one in pooled.items() if one.drafts_per_step is not None]
    if not known or not known[0][1]:
        return []
    (first, most), rest = known[0], known[1:]
    return [
        f"drafts accepted per step fall from {most:.2f} at {first} to {drafts:.2f} at {name}: the drafter may not reach that far"
        for name, drafts in rest
        if drafts < most / 2
    ]


def _context_name(index: int) -> str:
    edges = [f"{edge // 1024}K" for edge in CONTEXT_EDGES]
    if index == 0:
        return f"up to {edges[0]} prompt tokens"
    return f"over {edges[-1]} prompt tokens" if index == len(edges) else f"{edges[index - 1]} to {edges[index]} prompt tokens"


def _from_requests(known: Sequence[RequestRecord], *, num_ok: int) -> Acceptance:
    steps = sum(record.num_verify_steps or 0 for record in known)
    accepted = sum(accepted_of(record) or 0 for record in known)
    if steps == 0:
        reason = "no verify step ran (plain decoding, or one-token replies)"
        return Acceptance(num_verify_steps=0, num_requests=len(known), reason=reason)
    drafts = [record.num_draft_tokens for record in known if record.num_draft_tokens is not None]
    num_drafts = sum(drafts) if len(drafts) == len(known) else None
    is_counted = all(record.num_accepted is not None for record in known)
    own = [length for record in known if (length := request_acceptance_length(record)) is not None]
    warnings = list(_contribution(accepted, num_drafts))
    if len(known) < num_ok:
        warnings.append(f"only {len(known)} of {num_ok} requests told their counts; acceptance is pooled over those")
    if not is_counted:
        warnings.append(LOWER_BOUND)
    return Acceptance(
        acceptance_length=1.0 + accepted / steps,
        drafts_per_step=accepted / steps,
        request_mean=math.fsum(own) / len(own) if own else None,
        depth_survival=depth_survival(known),
        draft_acceptance_rate=accepted / num_drafts if num_drafts else None,
        mean_verify_width=1.0 + num_drafts / steps if num_drafts is not None else None,
        num_verify_steps=steps,
        num_accepted=accepted,
        num_draft_tokens=num_drafts,
        num_requests=len(known),
        source="accepted" if is_counted else "output_tokens",
        warnings=tuple(warnings),
    )


def _from_counters(counters: Mapping[str, float], reason: str | None, per_position: Mapping[int, float]) -> Acceptance:
    steps = counters.get("num_verify_steps")
    if steps is None:
        why = f"; {reason}" if reason else "; the server's counters hold no verify steps"
        return Acceptance(reason=f"unavailable: no request told its counts{why}")
    if steps == 0:
        return Acceptance(num_verify_steps=0, reason="no verify step ran in the window by the server's counters")
    accepted = counters.get("num_accepted")
    is_counted = accepted is not None
    if accepted is None:
        tokens, requests = counters.get("output_tokens"), counters.get("num_requests")
        if tokens is None or requests is None:
            return Acceptance(num_verify_steps=int(steps), reason="unavailable: the server's counters hold no accepted tokens")
        accepted = max(tokens - requests - steps, 0.0)  # one token of each request comes from its prefill
    drafts = counters.get("num_draft_tokens")
    return Acceptance(
        acceptance_length=1.0 + accepted / steps,
        drafts_per_step=accepted / steps,
        depth_survival=tuple(per_position[at] / steps for at in sorted(per_position) if per_position[at] > 0) or None,
        draft_acceptance_rate=accepted / drafts if drafts else None,
        mean_verify_width=1.0 + drafts / steps if drafts is not None else None,
        num_verify_steps=int(steps),
        num_accepted=int(accepted),
        num_draft_tokens=None if drafts is None else int(drafts),
        source="server_counters",
        warnings=(*_contribution(accepted, drafts), *(() if is_counted else (LOWER_BOUND,))),
    )


def _contribution(accepted: float, num_drafts: float | None) -> tuple[str, ...]:
    """Return the warning that speculation without any accepted token needs: its output is right all the same."""
    if num_drafts == 0:
        return ("nothing was drafted: this is plain decoding",)
    return ("draft contributes nothing: acceptance_length is 1.0, not one draft token was accepted",) if accepted == 0 else ()


def depth_survival(records: Sequence[RequestRecord]) -> tuple[float, ...] | None:
    """Return, for each depth d from 1, the share of steps with num_accepted ≥ d; None unless every request gave its histogram.

    It ends at the deepest depth that was accepted; where nothing was, it is empty.
    """
    histograms = [record.accepted_histogram for record in records if record.num_verify_steps]
    if not histograms or any(histogram is None for histogram in histograms):
        return None
    pooled = [0] * max(len(histogram or ()) for histogram in histograms)
    for histogram in histograms:
        for accepted, count in enumerate(histogram or ()):
            pooled[accepted] += count
    total = sum(pooled)
    shares = [sum(pooled[depth:]) / total for depth in range(1, len(pooled))]
    return tuple(share for share in shares if share > 0)
