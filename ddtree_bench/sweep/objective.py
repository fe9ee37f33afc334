"""From trial records to what a search needs: values, the front, the best. Pure functions; trial.json files are the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_bench.config import TreeSetting
from ddtree_bench.records import TrialRecord

PLAIN_ACCEPTANCE = 1.0  # plain decoding commits one token a step


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The study's fixed reference point: plain decoding in the same session. What failed is told to a sampler as this."""

    output_tok_s: float
    acceptance_length: float = PLAIN_ACCEPTANCE

    def value(self, objective: str) -> float:
        """Return the reference in one objective."""
        return {"output_tok_s": self.output_tok_s, "acceptance_length": self.acceptance_length}[objective]


def objective_values(record: TrialRecord, objectives: Sequence[str], reference: Reference) -> list[float]:
    """Return finite values in the order of the objectives; an unknown or failed one is the reference point's."""
    known = record.metrics if record.state == "complete" else {}
    return [reference.value(name) if known.get(name) is None else float(known[name]) for name in objectives]


def setting_of(record: TrialRecord) -> TreeSetting:
    """Return the canonical setting that a trial was asked to measure."""
    return TreeSetting(**record.asked).canonical()


def pareto_front(records: Sequence[TrialRecord], objectives: Sequence[str]) -> list[TrialRecord]:
    """Return the feasible trials that no other one dominates, by falling first objective; equals all stay."""
    points = [(_known_values(record, objectives), record) for record in records if record.is_feasible]
    front = [(values, record) for values, record in points if not any(_dominates(other, values) for other, _ in points)]
    return [record for _, record in sorted(front, key=lambda item: ([-value for value in item[0]], item[1].number))]


def _known_values(record: TrialRecord, objectives: Sequence[str]) -> list[float]:
    return [float("-inf") if record.metrics.get(name) is None else float(record.metrics[name]) for name in objectives]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True)) and any(a > b for a, b in zip(one, other, strict=True))


def best_trial(records: Sequence[TrialRecord], mode: str | None = None) -> TrialRecord | None:
    """Return the feasible trial with the least ms per token, never by acceptance; of equals the narrowest, then the first."""
    able = [r for r in records if r.is_feasible and r.metrics.get("ms_per_token") is not None]
    able = [r for r in able if mode is None or setting_of(r).mode == mode]
    return min(able, key=lambda r: (r.metrics["ms_per_token"], setting_of(r).verify_width, r.number), default=None)
