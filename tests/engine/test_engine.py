"""The engine's own border: refusals, aborts, memory, counters, and what the caches hold after scattered walks."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import PLAIN, engine_of, outputs, prompt_of, request_of, settings_of, tokens_of, use_oracle

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.engine import Engine
from ddtree_bench.engine.kv_caches import KVCaches, slots_of
from ddtree_bench.engine.sequence import SequenceState

TREE = TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)
WIDE = TreeSetting(mode="tree", block_size=16, node_budget=63, top_k=4)


def cached_rows(engine: Engine, caches: KVCaches | None, sequence: SequenceState) -> torch.Tensor:
    """Return keys and values of a sequence's cached tokens, all layers."""
    assert caches is not None
    slots = torch.from_numpy(slots_of(sequence.pages, np.arange(sequence.num_cached), engine.runner.page_size))
    return torch.stack([cache.flatten(0, 1)[slots] for cache in (*caches.k_caches, *caches.v_caches)])


def test_after_scattered_walks_the_caches_hold_the_path_alone(pair: Path) -> None:
    prompt = prompt_of(3, 11)
    answer = outputs(engine_of(pair), [request_of("r", prompt, max_tokens=60)])["r"]
    engine = engine_of(pair, TREE)
    use_oracle(engine, {"r": prompt}, {"r": answer}, hit_rate=0.6)
    engine.submit(request_of("r", prompt, max_tokens=60))
    while not engine.scheduler.running or engine.scheduler.running[0].num_output_tokens < 40:
        engine.step()
    sequence = engine.scheduler.running[0]
    assert max(i for i, n in enumerate(sequence.accepted_histogram) if n) >= 3
    fresh = engine_of(pair, TREE)
    fresh.submit(request_of("f", sequence.tokens[: sequence.num_cached], max_tokens=9))
    fresh.step()
    expected = fresh.scheduler.running[0]
    assert expected.num_cached == sequence.num_cached == len(sequence.tokens) - 1
    for ours, theirs in (
        (engine.runner.target_caches, fresh.runner.target_caches),
        (engine.runner.drafter_caches, fresh.runner.drafter_caches),
    ):
        torch.testing.assert_close(
            cached_rows(engine, ours, sequence), cached_rows(fresh, theirs, expected), atol=1e-4, rtol=1e-4
        )


def test_slot_0_of_a_block_is_the_root_and_the_others_are_masks(pair: Path) -> None:
    engine = engine_of(pair, TREE)
    engine.submit(request_of("r", prompt_of(0, 5), max_tokens=9))
    engine.step()
    root, embedded = engine.scheduler.running[0].root, []
    original = engine.runner.target.embed

    def embed(tokens_T: torch.Tensor) -> torch.Tensor:
        embedded.append(tokens_T.tolist())
        return original(tokens_T)

    engine.runner.target.embed = embed  # type: ignore[method-assign]
    engine.step()
    assert embedded[0] == [root] + [95] * 7


def test_a_prompt_up_to_the_context_leaves_neighbours_and_pages_alone(pair: Path) -> None:
    prompts = {"full": prompt_of(5, 255), "near": prompt_of(6, 240), "small": prompt_of(7, 4)}
    requests = [request_of(name, prompt, max_tokens=20) for name, prompt in prompts.items()]
    alone = {request.request_id: outputs(engine_of(pair, PLAIN), [request])[request.request_id] for request in requests}
    engine = engine_of(pair, WIDE)
    use_oracle(engine, prompts, alone, hit_rate=0.8)
    assert outputs(engine, requests) == alone
    assert {name: len(tokens) for name, tokens in alone.items()} == {"full": 1, "near": 16, "small": 20}
    assert engine.stats().num_free_pages == engine.stats().num_total_pages


def test_aborts_give_their_pages_back_and_leave_the_others_alone(pair: Path) -> None:
    prompts = {f"r{i}": prompt_of(i, 6 + i) for i in range(6)}
    requests = [request_of(name, prompt, max_tokens=30) for name, prompt in prompts.items()]
    expected = outputs(engine_of(pair), requests)
    engine = engine_of(pair, TREE, max_running_requests=3, max_total_tokens=256)
    for request in requests:
        engine.submit(request)
    collected: dict[str, list] = {name: [] for name in prompts}
    aborts = {2: "r1", 4: "r5", 6: "r0"}
    for step in range(1000):
        if step in aborts:
            engine.abort(aborts[step])
        for update in engine.step():
            collected[update.request_id].append(update)
        if not engine.has_work:
            break
    for name, updates in collected.items():
        is_aborted = name in aborts.values()
        assert updates[-1].finish_reason == ("abort" if is_aborted else "length")
        assert tokens_of(updates) == expected[name][: len(tokens_of(updates))]
        assert is_aborted or tokens_of(updates) == expected[name]
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_total_pages
    assert stats.num_finished == {"abort": 3, "length": 3}
    engine.abort("r1")
    engine.abort("unknown")
    assert not engine.has_work


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "prompt must have 1 to 255 tokens; it has 0"),
        ([1] * 256, {}, "prompt must have 1 to 255 tokens; it has 256"),
        ([1, 96], {}, r"prompt tokens must be in \[0, 96\); given 96"),
        ([1], {"stop": ("x",)}, "stop strings must have a tokenizer"),
    ],
    ids=["empty", "too_long", "unknown_token", "stop_without_tokenizer"],
)
def test_what_can_never_run_ends_with_an_error(pair: Path, prompt: list[int], sampling: dict, message: str) -> None:
    engine = engine_of(pair)
    (update,) = engine.generate([request_of("r", prompt, **sampling)])["r"]
    assert update.finish_reason == "error"
    assert update.error is not None
    assert re.search(message, update.error)


def test_a_request_id_in_use_is_refused(pair: Path) -> None:
    engine = engine_of(pair)
    engine.submit(request_of("r", [1]))
    with pytest.raises(ValueError, match="request_id must be new; 'r'"):
        engine.submit(request_of("r", [1]))


def test_a_target_without_finite_logits_is_an_error_of_the_request(pair: Path) -> None:
    engine = engine_of(pair, TREE)
    with torch.no_grad():
        engine.runner.target.norm.weight.fill_(float("nan"))
    (update,) = engine.generate([request_of("r", [1, 2])])["r"]
    assert update.finish_reason == "error"
    assert "finite" in (update.error or "")


def test_context_shrinks_to_the_pool_and_one_request_always_fits(pair: Path) -> None:
    engine = engine_of(pair, TREE, max_total_tokens=64)
    assert engine.max_context == 64 - 16
    (last,) = engine.generate([request_of("r", prompt_of(1, 40), max_tokens=100)])["r"][-1:]
    assert (last.num_prompt_tokens + last.num_output_tokens, last.finish_reason) == (48, "length")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": 257}, "max_context must be at most 256"),
        ({"max_context": 100, "max_total_tokens": 64}, "max_context must be at most 48"),
        ({"max_total_tokens": 16}, "raise max_total_tokens or lower node_budget"),
        ({"max_total_tokens": 3}, "room for at least one page"),
        ({"drafter": None}, "must have a drafter"),
    ],
)
def test_settings_that_do_not_fit_are_refused(pair: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(dataclasses.replace(settings_of(pair, TREE), **changes))


def test_memory_sizes_the_pool_by_what_requests_can_use(pair: Path) -> None:
    engine = engine_of(pair, TREE, max_total_tokens=None, max_running_requests=3, page_size=16)
    assert engine.stats().num_total_pages == 3 * ((256 + 16) // 16)


def test_counters_are_sums_over_requests(pair: Path) -> None:
    prompts = {f"r{i}": prompt_of(i, 6 + i) for i in range(3)}
    requests = [request_of(name, prompt, max_tokens=25) for name, prompt in prompts.items()]
    answers = outputs(engine_of(pair), requests)
    engine = engine_of(pair, TREE)
    use_oracle(engine, prompts, answers, hit_rate=0.7)
    ends = [updates[-1] for updates in engine.generate(requests).values()]
    stats = engine.stats()
    for name in ("num_verify_steps", "num_accepted", "num_draft_tokens", "num_cut"):
        assert getattr(stats, name) == sum(getattr(end.spec, name) for end in ends)
    assert sum(stats.accepted_per_depth) == stats.num_accepted
    assert list(stats.accepted_per_depth) == sorted(stats.accepted_per_depth, reverse=True)
    assert stats.num_output_tokens == sum(end.num_output_tokens for end in ends) == 75
    assert stats.num_prompt_tokens == 21
    assert (stats.num_running, stats.num_waiting, stats.num_finished) == (0, 0, {"length": 3})


@pytest.mark.parametrize("setting", [PLAIN, TreeSetting(mode="linear", block_size=8), TREE], ids=TreeSetting.label)
def test_bfloat16_runs_in_every_mode(pair: Path, setting: TreeSetting) -> None:
    engine = engine_of(pair, setting, dtype="bfloat16")
    tokens = outputs(engine, [request_of("r", prompt_of(2, 9), max_tokens=20), request_of("s", [5], max_tokens=20)])
    assert {name: len(each) for name, each in tokens.items()} == {"r": 20, "s": 20}
