"""Admission, chunks, preemption and pages, without a model."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import request_of

from ddtree_bench.engine.page_pool import PagePool
from ddtree_bench.engine.scheduler import Scheduler, Step
from ddtree_bench.engine.sequence import SequenceState
from ddtree_bench.engine.text_stream import TextStream


def sequence_of(name: str, num_prompt_tokens: int, max_tokens: int = 1000) -> SequenceState:
    return SequenceState(
        request=request_of(name, [1] * num_prompt_tokens, max_tokens=max_tokens),
        max_context=10_000,
        eos_token_ids=frozenset(),
        text=TextStream(None),
    )


def scheduler_of(num_pages: int, **changes: Any) -> Scheduler:
    values = {"verify_width": 4, "max_running": 8, "max_prefill_tokens": 100, **changes}
    return Scheduler(PagePool(num_pages, 4), **values)


def play(step: Step, num_tokens: int = 1) -> None:
    """Do to the sequences what a model would: cache the chunks, or add tokens."""
    for chunk in step.prefill:
        chunk.sequence.num_cached = chunk.stop
        if chunk.stop == chunk.sequence.num_prompt_tokens and not chunk.sequence.num_output_tokens:
            chunk.sequence.start_from_prefill(0)
    for sequence in step.decode:
        sequence.end_verify_step([0] * num_tokens, num_draft_tokens=3)


def names(sequences: Any) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def test_a_page_released_twice_is_an_assertion() -> None:
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_pages_are_handed_out_once() -> None:
    pool = PagePool(5, 4)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="needs 1 pages and 0 are free"):
        pool.allocate(1)
    assert (pool.pages_for(0), pool.pages_for(4), pool.pages_for(5)) == (0, 1, 2)


def test_requests_start_in_order_while_pages_last() -> None:
    scheduler = scheduler_of(8)
    for name, size in (("a", 8), ("b", 12), ("c", 1)):
        scheduler.add(sequence_of(name, size))
    scheduler.next_step()
    assert names(scheduler.running) == ["a", "b"][: len(scheduler.running)]
    assert "c" in names(scheduler.waiting), "a later request does not overtake one that waits"


def test_no_more_run_than_allowed() -> None:
    scheduler = scheduler_of(100, max_running=2)
    for name in "abc":
        scheduler.add(sequence_of(name, 3))
    scheduler.next_step()
    assert (names(scheduler.running), names(scheduler.waiting)) == (["a", "b"], ["c"])


def test_prompts_longer_than_the_budget_run_in_chunks_between_rounds() -> None:
    scheduler = scheduler_of(100, max_prefill_tokens=10)
    scheduler.add(sequence_of("short", 4))
    play(scheduler.next_step())
    scheduler.add(sequence_of("long", 25))
    kinds = []
    for _ in range(6):
        step = scheduler.next_step()
        kinds.append([(c.start, c.stop) for c in step.prefill] or names(step.decode))
        play(step)
    assert kinds == [["short"], [(0, 10)], ["short"], [(10, 20)], ["short"], [(20, 25)]]


def test_the_youngest_makes_room_and_comes_back_first() -> None:
    scheduler = scheduler_of(6)
    for name in ("old", "young"):
        scheduler.add(sequence_of(name, 4))
    play(scheduler.next_step())
    scheduler.add(sequence_of("later", 4))
    while not scheduler.num_preemptions:
        play(scheduler.next_step())
    assert names(scheduler.running) == ["old"]
    assert names(scheduler.waiting) == ["young", "later"]
    young = scheduler.waiting[0]
    assert (young.num_cached, young.pages) == (0, [])
    assert young.num_to_prefill == len(young.tokens) - 1
    scheduler.remove(scheduler.running[0])
    step = scheduler.next_step()
    assert names(c.sequence for c in step.prefill)[0] == "young"
    num_tokens = len(young.tokens)
    play(step)
    assert len(young.tokens) == num_tokens, "a root that is known is not chosen again"
    assert young.is_prefilled


def test_all_pages_come_back() -> None:
    scheduler = scheduler_of(12)
    for i in range(6):
        scheduler.add(sequence_of(str(i), 3 + 2 * i, max_tokens=9 + i))
    for _ in range(300):
        play(scheduler.next_step(), num_tokens=3)
        for sequence in tuple(scheduler.running):
            if sequence.finish_reason is not None:
                scheduler.remove(sequence)
        if not scheduler.has_work:
            break
    assert not scheduler.has_work
    assert scheduler.num_preemptions > 0
    assert scheduler.pages.num_free == 12
