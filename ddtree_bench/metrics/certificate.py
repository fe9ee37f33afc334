"""Certificate that two arms wrote the same text: exact, a numeric tie of the target's top two, or a real difference.

Pure; whether a difference is a tie is decided by whoever can ask the target (`classify`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddtree_bench.records import GateResult, RequestRecord

if TYPE_CHECKING:
    from ddtree_bench.metrics.comparison import Arm


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Whether two arms wrote the same text for the same prompts and seeds.

    `undecided` are differences that nobody could trace to a numeric tie or to a fault; `note` says what a tie was taken to be.
    """

    baseline: str
    arm: str
    num_prompts: int
    tokens_compared: int
    num_exact: int
    num_numeric_ties: int
    num_real_differences: int
    num_undecided: int
    examples: Sequence[Mapping[str, str]] = ()
    note: str = ""

    def gate(self) -> GateResult:
        """Return the gate "same output as BASELINE": failed by a real difference, unknown while any is undecided."""
        passed: bool | None = self.num_real_differences == 0
        if passed and (self.num_undecided or not self.num_prompts):
            passed = None
        detail = (
            f"{self.num_exact} of {self.num_prompts} prompts exact over {self.tokens_compared} tokens, "
            f"{self.num_numeric_ties} numeric ties, {self.num_real_differences} real differences"
        )
        if self.num_undecided:
            detail += f", {self.num_undecided} differences not traced to a tie or a fault"
        if self.num_numeric_ties and self.note:
            detail += f"; {self.note}"
        numbers = {"num_numeric_ties": self.num_numeric_ties, "num_undecided": self.num_undecided}
        return GateResult(name=f"same output as {self.baseline}", passed=passed, detail=detail, numbers=numbers)


def output_certificate(
    baseline: Arm, arm: Arm, classify: Callable[[RequestRecord, RequestRecord], str] | None = None, *, num_examples: int = 3
) -> Certificate:
    """Compare the texts of two arms, prompt by prompt over all blocks.

    Args:
        classify: says "exact", "tie", "real" or "undecided" of two records whose texts differ; without it a difference is real.
    """
    outcomes: dict[str, set[str]] = {}
    tokens = 0
    examples: list[dict[str, str]] = []
    for first_block, second_block in zip(baseline.blocks, arm.blocks, strict=True):
        seconds = {r.prompt_id: r for r in second_block if r.outcome == "ok"}
        for first in first_block:
            second = seconds.get(first.prompt_id)
            if first.outcome != "ok" or second is None:
                continue
            is_same = (first.text, first.reasoning) == (second.text, second.reasoning)
            outcome = "exact" if is_same else classify(first, second) if classify else "real"
            outcomes.setdefault(first.prompt_id, set()).add(outcome)
            tokens += min(first.output_tokens or 0, second.output_tokens or 0)
            if outcome != "exact" and len(examples) < num_examples:
                examples.append(_first_difference(first, second, outcome))
    worst = [next(kind for kind in ("real", "undecided", "tie", "exact") if kind in seen) for seen in outcomes.values()]
    return Certificate(
        baseline=baseline.name,
        arm=arm.name,
        num_prompts=len(worst),
        tokens_compared=tokens,
        num_exact=worst.count("exact"),
        num_numeric_ties=worst.count("tie"),
        num_real_differences=worst.count("real"),
        num_undecided=worst.count("undecided"),
        examples=examples,
    )


def _first_difference(first: RequestRecord, second: RequestRecord, outcome: str) -> dict[str, str]:
    a, b = first.reasoning + first.text, second.reasoning + second.text
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    where = slice(max(0, at - 20), at + 20)
    return {"prompt_id": first.prompt_id, "outcome": outcome, "at_character": str(at), "baseline": a[where], "arm": b[where]}
