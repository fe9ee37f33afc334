"""Counters of one engine since it started; the server turns them into its own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddtree_bench.engine.sequence import SequenceState


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot.

    Args:
        num_running, num_waiting: requests now.
        num_free_pages, num_total_pages, page_size: the cache now.
        num_rounds: decoding rounds; each holds one verify step of every request in it.
        num_verify_steps, num_accepted, num_draft_tokens, num_cut: sums over requests (DESIGN section 4.4).
        accepted_per_depth: entry d − 1 counts the verify steps that accepted at least d draft tokens.
        num_prompt_tokens: of requests that were admitted, once each; num_output_tokens: emitted, after cuts.
        num_finished: requests that ended, by finish_reason.
        stage_seconds: the host's time by stage of the step, what no stage took under "unattributed".
        step_seconds: the host's time in steps; the stages add up to it.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_total_pages: int
    page_size: int
    num_rounds: int = 0
    num_prefill_steps: int = 0
    num_preemptions: int = 0
    num_verify_steps: int = 0
    num_accepted: int = 0
    num_draft_tokens: int = 0
    num_cut: int = 0
    accepted_per_depth: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: Mapping[str, int] = field(default_factory=dict)
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0


class Counters:
    """Sums that a step adds to, from the differences of a sequence's own counts."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.num_prefill_steps = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_verify_steps = 0
        self.num_accepted = 0
        self.num_draft_tokens = 0
        self.num_cut = 0
        self.accepted_per_depth: list[int] = []
        self.num_finished: dict[str, int] = {}

    def add_step(self, before: SequenceCounts, sequence: SequenceState) -> None:
        """Add what one step did to one sequence."""
        after = SequenceCounts.of(sequence)
        num_accepted = after.num_accepted - before.num_accepted
        self.num_output_tokens += after.num_output_tokens - before.num_output_tokens
        self.num_verify_steps += after.num_verify_steps - before.num_verify_steps
        self.num_accepted += num_accepted
        self.num_draft_tokens += after.num_draft_tokens - before.num_draft_tokens
        self.num_cut += after.num_cut - before.num_cut
        self.accepted_per_depth.extend([0] * (num_accepted - len(self.accepted_per_depth)))
        for depth in range(num_accepted):
            self.accepted_per_depth[depth] += 1

    def add_end(self, reason: str) -> None:
        """Count a request that has ended."""
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1


@dataclass(frozen=True, kw_only=True)
class SequenceCounts:
    """A sequence's counts at one moment."""

    num_output_tokens: int
    num_verify_steps: int
    num_accepted: int
    num_draft_tokens: int
    num_cut: int

    @classmethod
    def of(cls, sequence: SequenceState) -> SequenceCounts:
        """Read them."""
        return cls(
            num_output_tokens=sequence.num_output_tokens,
            num_verify_steps=sequence.num_verify_steps,
            num_accepted=sequence.num_accepted,
            num_draft_tokens=sequence.num_draft_tokens,
            num_cut=sequence.num_cut,
        )
