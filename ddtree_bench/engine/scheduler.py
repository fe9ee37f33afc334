"""Who runs next: continuous batching, admission by memory, chunked prefill, preemption of the youngest.

Decisions depend on the order of calls and on lengths alone, so every rank decides the same. What runs is left to
`runner` and `round`; a step is either one prefill batch or one decoding round, in turns while both have work, so that
first tokens leave as soon as they exist and running requests never wait for more than one chunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ddtree_bench.engine.page_pool import PagePool
from ddtree_bench.engine.sequence import SequenceState, Status


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """The tokens [start, stop) of one sequence, to be cached in this step."""

    sequence: SequenceState
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step runs; one of the two is empty."""

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[SequenceState, ...] = ()


class Scheduler:
    """Hold the waiting and the running sequences and the free pages.

    Args:
        pages: the pool of both caches.
        verify_width: rows of one verify step, which need slots behind the prefix.
        max_running: sequences that run together at most.
        max_prefill_tokens: tokens of one prefill step at most.
    """

    def __init__(self, pages: PagePool, *, verify_width: int, max_running: int, max_prefill_tokens: int) -> None:
        self.pages = pages
        self.verify_width = verify_width
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self._was_prefill = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def find(self, request_id: str) -> SequenceState | None:
        """Return the sequence of a request that has not finished."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request.request_id == request_id:
                return sequence
        return None

    def remove(self, sequence: SequenceState) -> None:
        """Take out a sequence that has ended, with its pages."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        sequence.status = Status.FINISHED

    def next_step(self) -> Step:
        """Return what to run now; empty only where there is no work."""
        self._admit()
        assert self.running or not self.waiting, "a sequence that runs alone always fits the pool"
        needs_prefill = any(not sequence.is_prefilled for sequence in self.running)
        can_decode = any(sequence.is_prefilled for sequence in self.running)
        if needs_prefill and not (can_decode and self._was_prefill):
            self._was_prefill = True
            return Step(prefill=self._prefill_chunks())
        self._was_prefill = False
        return Step(decode=self._decode_batch())

    def _admit(self) -> None:
        """Start waiting sequences in order while pages remain for them and one verify step of every running one."""
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            needed = self.pages.pages_for(sequence.num_to_prefill + self.verify_width)
            reserve = len(self.running) * self.pages.pages_for(self.verify_width)
            if needed + reserve > self.pages.num_free:
                return
            self.waiting.popleft()
            sequence.pages = self.pages.allocate(needed)
            sequence.status = Status.RUNNING
            self.running.append(sequence)

    def _prefill_chunks(self) -> tuple[PrefillChunk, ...]:
        chunks, budget = [], self.max_prefill_tokens
        for sequence in self.running:
            remaining = sequence.num_to_prefill - sequence.num_cached
            size = min(remaining, budget)
            if not sequence.is_prefilled and size > 0:
                start = sequence.num_cached
                chunks.append(PrefillChunk(sequence=sequence, start=start, stop=start + size))
                budget -= size
        return tuple(chunks)

    def _decode_batch(self) -> tuple[SequenceState, ...]:
        """Give every prefilled sequence slots for its verify step, oldest first; the youngest makes room."""
        batch = []
        for sequence in tuple(self.running):
            if sequence.status is Status.RUNNING and sequence.is_prefilled and self._make_room(sequence):
                batch.append(sequence)
        return tuple(batch)

    def _make_room(self, sequence: SequenceState) -> bool:
        missing = self.pages.pages_for(sequence.num_cached + self.verify_width) - len(sequence.pages)
        while missing > self.pages.num_free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.pages += self.pages.allocate(max(0, missing))
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Free everything; the sequence starts again from prompt and output, before all that wait."""
        self._leave(sequence)
        sequence.num_cached = 0
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _leave(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        sequence.pages = []
