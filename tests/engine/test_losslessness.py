"""Plain, linear and tree decoding give the same tokens in float32, whatever the batch, the setting and the sampling."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import CHAINS, PLAIN, SHAPED, TREES, engine_of, outputs, prompt_of, request_of, tokens_of, use_oracle

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine import round as round_module
from ddtree_bench.engine.engine import Engine
from ddtree_bench.engine.request import GenerationRequest

NUM_TOKENS = 30
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 1.0, "seed": 11}
PROMPTS = {f"r{i}": prompt_of(i, 3 + 5 * i) for i in range(5)}
EXTRAS = {
    "top_p": {"temperature": 1.0, "top_p": 0.6, "seed": 3},
    "top_k": {"temperature": 0.8, "top_k": 5, "seed": 4},
    "min_p": {"temperature": 1.2, "min_p": 0.4, "seed": 5},
    "all_filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "seed": 6},
    "repetition_greedy": {"repetition_penalty": 1.4},
    "penalties_sampled": {
        "temperature": 0.9,
        "seed": 7,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "negative_penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
}


def requests_of(batch_size: int, sampling: dict[str, Any]) -> list[GenerationRequest]:
    return [request_of(name, PROMPTS[name], max_tokens=NUM_TOKENS, **sampling) for name in list(PROMPTS)[:batch_size]]


@pytest.fixture(scope="module")
def plain_outputs(pair: Path) -> dict[str, dict[str, list[int]]]:
    """Outputs of plain decoding, each request alone."""
    cases = {"greedy": GREEDY, "sampled": SAMPLED, **EXTRAS}
    return {
        case: {
            name: outputs(engine_of(pair), [request_of(name, PROMPTS[name], max_tokens=NUM_TOKENS, **sampling)])[name]
            for name in PROMPTS
        }
        for case, sampling in cases.items()
    }


def oracle_engine(pair: Path, setting: TreeSetting, answers: dict[str, list[int]], **changes: Any) -> Engine:
    engine = engine_of(pair, setting, **changes)
    use_oracle(engine, PROMPTS, answers, hit_rate=0.7)
    return engine


@pytest.mark.parametrize("case", ["greedy", "sampled"])
@pytest.mark.parametrize("setting", [*CHAINS, *TREES, *SHAPED], ids=TreeSetting.label)
def test_every_setting_gives_the_tokens_of_plain_decoding(
    pair: Path, plain_outputs: dict[str, dict[str, list[int]]], setting: TreeSetting, case: str
) -> None:
    sampling, plain = (GREEDY if case == "greedy" else SAMPLED), plain_outputs[case]
    for batch_size in (1, 5):
        engine = oracle_engine(pair, setting, plain)
        assert outputs(engine, requests_of(batch_size, sampling)) == {name: plain[name] for name in list(PROMPTS)[:batch_size]}
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_total_pages
        if setting.node_budget > 1:
            assert stats.num_accepted > stats.num_verify_steps / 3, "the test must walk trees, not only build them"


@pytest.mark.parametrize("case", EXTRAS)
@pytest.mark.parametrize("setting", [CHAINS[1], TREES[6]], ids=TreeSetting.label)
def test_filters_and_penalties_give_the_tokens_of_plain_decoding(
    pair: Path, plain_outputs: dict[str, dict[str, list[int]]], setting: TreeSetting, case: str
) -> None:
    engine = oracle_engine(pair, setting, plain_outputs[case])
    assert outputs(engine, requests_of(5, EXTRAS[case])) == plain_outputs[case]
    assert engine.stats().num_accepted > 0


def test_penalties_change_the_output(plain_outputs: dict[str, dict[str, list[int]]]) -> None:
    assert plain_outputs["repetition_greedy"] != plain_outputs["greedy"]
    assert plain_outputs["penalties_sampled"] != plain_outputs["sampled"]


@pytest.mark.parametrize("setting", [CHAINS[1], TREES[6]], ids=TreeSetting.label)
def test_the_real_drafter_is_lossless_too(
    pair: Path, plain_outputs: dict[str, dict[str, list[int]]], setting: TreeSetting
) -> None:
    for case, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        assert outputs(engine_of(pair, setting), requests_of(5, sampling)) == plain_outputs[case]


def test_requests_of_every_kind_share_a_batch(pair: Path, plain_outputs: dict[str, dict[str, list[int]]]) -> None:
    kinds = {"r0": "greedy", "r1": "sampled", "r2": "top_p", "r3": "penalties_sampled", "r4": "repetition_greedy"}
    all_sampling = {"greedy": GREEDY, "sampled": SAMPLED, **EXTRAS}
    expected = {name: plain_outputs[kind][name] for name, kind in kinds.items()}
    requests = [request_of(n, PROMPTS[n], max_tokens=NUM_TOKENS, **all_sampling[kind]) for n, kind in kinds.items()]
    for setting in (PLAIN, CHAINS[1], TREES[6]):
        engine = engine_of(pair, setting)
        if setting.mode != "plain":
            use_oracle(engine, PROMPTS, expected, hit_rate=0.7)
        assert outputs(engine, requests) == expected


def test_neighbours_that_accept_0_some_and_all_keep_their_own_tokens(
    pair: Path, plain_outputs: dict[str, dict[str, list[int]]]
) -> None:
    plain = plain_outputs["greedy"]
    engine = engine_of(pair, TREES[10])
    use_oracle(engine, PROMPTS, plain, hit_rate={"r0": 0.0, "r1": 0.6, "r2": 1.0, "r3": 0.9, "r4": 0.3})
    updates = engine.generate(requests_of(5, GREEDY))
    assert {name: tokens_of(each) for name, each in updates.items()} == plain
    longest = {name: max(len(update.token_ids) for update in each) for name, each in updates.items()}
    assert longest["r2"] >= 8
    assert longest["r0"] < longest["r2"]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_size_does_not_matter(pair: Path, plain_outputs: dict[str, dict[str, list[int]]], page_size: int) -> None:
    engine = oracle_engine(pair, TREES[6], plain_outputs["greedy"], page_size=page_size)
    assert outputs(engine, requests_of(5, GREEDY)) == plain_outputs["greedy"]


def test_chunked_prefill_gives_the_tokens_of_whole_prefill(pair: Path, plain_outputs: dict[str, dict[str, list[int]]]) -> None:
    engine = oracle_engine(pair, TREES[6], plain_outputs["sampled"], max_prefill_tokens=4)
    assert outputs(engine, requests_of(5, SAMPLED)) == plain_outputs["sampled"]
    assert engine.stats().num_prefill_steps > 10


@pytest.mark.parametrize("case", ["greedy", "sampled", "penalties_sampled"])
def test_preemption_keeps_outputs(pair: Path, plain_outputs: dict[str, dict[str, list[int]]], case: str) -> None:
    sampling = {"greedy": GREEDY, "sampled": SAMPLED, **EXTRAS}[case]
    engine = oracle_engine(pair, TREES[6], plain_outputs[case], max_total_tokens=112)
    assert outputs(engine, requests_of(5, sampling)) == plain_outputs[case]
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_pages == stats.num_total_pages


def test_nothing_is_read_that_was_not_written(pair: Path, plain_outputs: dict[str, dict[str, list[int]]]) -> None:
    engine = oracle_engine(pair, TREES[10], plain_outputs["greedy"], max_total_tokens=400)
    for caches in (engine.runner.target_caches, engine.runner.drafter_caches):
        assert caches is not None
        for cache_PSGE in (*caches.k_caches, *caches.v_caches):
            cache_PSGE.fill_(float("nan"))
    assert outputs(engine, requests_of(5, GREEDY)) == plain_outputs["greedy"]


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_accepts_at_least_what_the_chain_in_it_accepts(
    pair: Path, plain_outputs: dict[str, dict[str, list[int]]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"r{seed % 5}"
    accepted, trees = [], []
    original = round_module.walk_tree

    def record(*arguments: torch.Tensor) -> Any:
        walk = original(*arguments)
        accepted.append(int(walk.num_accepted_B[0]))
        trees.append([x[0].tolist() for x in arguments[:2]])
        return walk

    monkeypatch.setattr(round_module, "walk_tree", record)
    for setting in (CHAINS[1], TREES[5], TREES[6], TREES[7]):
        engine = engine_of(pair, setting)
        use_oracle(engine, PROMPTS, plain_outputs["greedy"], hit_rate=0.5 + 0.1 * (seed % 4))
        engine.generate([request_of(name, PROMPTS[name], max_tokens=2)])
    chain_tokens = trees[0][0][1:]
    for num_accepted, (tokens, parents) in zip(accepted[1:], trees[1:], strict=True):
        assert num_accepted >= min(accepted[0], _chain_length(chain_tokens, tokens, parents))


def _chain_length(chain_tokens: list[int], tokens: list[int], parents: list[int]) -> int:
    """Return how many leading chain tokens a tree holds as one path."""
    node = 0
    for length, token in enumerate(chain_tokens):
        children = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token]
        if not children:
            return length
        node = children[0]
    return len(chain_tokens)


def test_logprobs_are_those_of_plain_decoding(pair: Path, plain_outputs: dict[str, dict[str, list[int]]]) -> None:
    request = request_of("r2", PROMPTS["r2"], max_tokens=NUM_TOKENS, logprobs=3, **SAMPLED)
    tree_engine = oracle_engine(pair, TREES[6], plain_outputs["sampled"])
    reports = []
    for engine in (engine_of(pair), tree_engine):
        updates = engine.generate([request])["r2"]
        assert all(len(update.logprobs) == len(update.token_ids) for update in updates)
        reports.append([entry for update in updates for entry in update.logprobs])
    for plain, tree in zip(*reports, strict=True):
        assert plain.token == tree.token
        assert plain.logprob == pytest.approx(tree.logprob, abs=1e-4)
        assert [token for token, _ in plain.top] == [token for token, _ in tree.top]
        assert all(a >= b for (_, a), (_, b) in zip(plain.top, plain.top[1:], strict=False))


def test_block_sizes_beyond_the_drafters_are_refused(pair: Path) -> None:
    with pytest.raises(ValueError, match="block_size must be at most the drafter's 16"):
        engine_of(pair, dataclasses.replace(TREES[0], block_size=17))
