"""The stages of a step and what no stage took add up to the step, from the first step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, repeat
from pathlib import Path

import pytest
from engine_support import PLAIN, engine_of, prompt_of, request_of

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.stage_clock import UNATTRIBUTED, StageClock

TREE = TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)
STAGES = {"prefill", "draft", "build_tree", "verify", "walk", "commit", UNATTRIBUTED}


def ticking(gaps: Iterator[float]) -> Callable[[], float]:
    """Return a clock that goes on by the next gap whenever it is read."""
    times = accumulate(gaps)
    return lambda: next(times)


def test_what_no_stage_took_is_unattributed() -> None:
    # Reads: step starts, draft 2 to 5, verify 9 to 10, step ends at 16.
    clock = StageClock(now=ticking(iter([0.0, 2.0, 3.0, 4.0, 1.0, 6.0])))
    with clock.step():
        with clock.stage("draft"):
            pass
        with clock.stage("verify"):
            pass
    assert clock.seconds == {"draft": 3.0, "verify": 1.0, UNATTRIBUTED: 12.0}
    assert clock.step_seconds == 16.0


def test_a_step_that_fails_is_counted_too() -> None:
    clock = StageClock(now=ticking(repeat(1.0)))
    with pytest.raises(RuntimeError), clock.step(), clock.stage("draft"):
        raise RuntimeError
    assert clock.seconds == {"draft": 1.0, UNATTRIBUTED: 2.0}
    assert clock.step_seconds == 3.0


@pytest.mark.parametrize("setting", [PLAIN, TREE], ids=TreeSetting.label)
def test_stages_and_the_unattributed_rest_add_up_to_the_steps_and_hold_the_first_draft(pair: Path, setting: TreeSetting) -> None:
    engine = engine_of(pair, setting)
    engine._clock = StageClock(now=ticking(repeat(1.0)))  # a second passes from each reading to the next
    engine.submit(request_of("r", prompt_of(1, 9), max_tokens=30))
    engine.step()
    assert engine.stats().stage_seconds == {"prefill": 1.0, UNATTRIBUTED: 2.0}
    engine.step()
    stats = engine.stats()
    assert set(stats.stage_seconds) == STAGES
    assert stats.stage_seconds["draft"] == 1.0, "the first round's draft is counted"
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.stage_seconds["draft"] == stats.num_rounds
    assert sum(stats.stage_seconds.values()) == stats.step_seconds
