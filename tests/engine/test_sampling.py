"""The target's choices follow its own adjusted distribution, exactly, and do not depend on mode or shard."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import PLAIN, engine_of, request_of, tokens_of, write_pair

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine import noise as noise_module
from ddtree_bench.engine import round as round_module
from ddtree_bench.engine import sampling as sampling_module
from ddtree_bench.engine.noise import gumbel_noise
from ddtree_bench.engine.penalties import TokenHistory, penalise
from ddtree_bench.engine.request import SamplingParams
from ddtree_bench.engine.sampling import ChoiceBatch, allowed_tokens, choose_tokens
from ddtree_bench.kernels.walk_tree import walk_tree
from ddtree_bench.models.parallel import Parallel

Record = Callable[[str, object], None]
# Seeds are fixed, so a test that passes once passes always; a right sampler had this chance to fail it when it was written.
LEAST_P_VALUE = 1e-3


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Return the statistic of counts under these probabilities and its p-value: how likely one at least as large is."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(statistic), float(torch.special.gammaincc(half_degrees, statistic / 2))


def check_follows(counts: torch.Tensor, probabilities: torch.Tensor, record: Record, name: str = "chi-square") -> None:
    """Assert that counts follow the probabilities, and record how well."""
    statistic, p_value = chi_square(counts, probabilities)
    figures = f"{statistic:.2f} at {len(counts) - 1} degrees of freedom, p = {p_value:.3g}, {int(counts.sum())} samples"
    record(name, figures)
    assert p_value > LEAST_P_VALUE, f"{name}: {figures}; p must be above {LEAST_P_VALUE}"


def choose_many(logits_V: torch.Tensor, num_samples: int, **sampling: Any) -> torch.Tensor:
    """Return how often each token is chosen at `num_samples` positions."""
    logits_1NV = logits_V.repeat(1, num_samples, 1)
    batch = ChoiceBatch(
        samplings=[SamplingParams(seed=3, **sampling)],
        histories=[None],
        positions_BN=torch.arange(num_samples)[None],
        tokens_BN=torch.zeros(1, num_samples, dtype=torch.int64),
        visibility_BNN=None,
    )
    return choose_tokens(logits_1NV, batch, Parallel.single(), 0)[0].bincount(minlength=len(logits_V)).double()


@pytest.mark.parametrize(("degrees", "limit"), [(1, 10.828), (3, 16.266), (7, 24.322), (15, 37.697)])
def test_p_values_are_those_of_printed_tables(degrees: int, limit: float) -> None:
    """The 99.9 % points; all the deviation is put on one of the counts that are expected to be equal."""
    num_cells, each = degrees + 1, 10_000.0
    excess = math.sqrt(limit * each * degrees / num_cells)
    counts = torch.full((num_cells,), each, dtype=torch.float64) - excess / degrees
    counts[0] = each + excess
    statistic, p_value = chi_square(counts, torch.full((num_cells,), 1 / num_cells, dtype=torch.float64))
    assert statistic == pytest.approx(limit)
    assert p_value == pytest.approx(1e-3, rel=1e-3)


def test_choices_at_temperature_follow_the_softmax(record_property: Record) -> None:
    logits_V = torch.tensor([1.0, -0.5, 0.3, 2.0, -2.0, 0.0, 0.1, 1.1])
    for temperature in (0.7, 1.0, 1.6):
        counts = choose_many(logits_V, 20_000, temperature=temperature)
        check_follows(counts, (logits_V / temperature).softmax(0), record_property, f"temperature {temperature}")


def test_filtered_choices_follow_the_renormalised_softmax(record_property: Record) -> None:
    logits_V = torch.tensor([1.0, -0.5, 0.3, 2.0, -2.0, 0.0, 0.1, 1.1])
    best = [3, 7, 0, 2]
    probabilities = logits_V.softmax(0)
    top_p = float(probabilities[best].sum()) - 0.01
    for filters in ({"top_k": 4}, {"top_p": top_p}, {"min_p": float(probabilities[2] / probabilities[3]) * 0.99}):
        counts = choose_many(logits_V, 8_000, temperature=1.0, **filters)
        kept = torch.zeros(8)
        kept[best] = probabilities[best]
        assert counts[kept == 0].sum() == 0
        check_follows(counts[best], kept[best] / kept.sum(), record_property, next(iter(filters)))


def test_tokens_of_probability_zero_are_never_chosen(record_property: Record) -> None:
    logits_V = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])
    counts = choose_many(logits_V, 5_000, temperature=1.0)
    assert counts[[0, 2]].sum() == 0
    check_follows(counts[[1, 3]], torch.tensor([0.5, 0.5]), record_property)


@pytest.mark.parametrize("bits", [0, 0x7FFFFFFF, -1], ids=["lowest", "highest", "all-set"])
def test_a_token_of_probability_zero_is_never_chosen_at_either_end_of_the_uniform(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_module, "_mix_32", lambda x, key: torch.full_like(x + key, bits))
    noise = gumbel_noise([0], torch.tensor([[5]]), 0, 3)
    assert noise.isfinite().all(), "an infinite noise would make NaN of a token without probability, or choose it"
    assert -2.9 < float(noise.min()) <= float(noise.max()) < 22.2
    assert choose_many(torch.tensor([-torch.inf, -60.0, -torch.inf]), 3, temperature=1.0).tolist() == [0, 3, 0]


def test_a_token_of_probability_zero_loses_with_the_best_noise_to_a_token_with_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    best, worst = 22.2, -2.9
    monkeypatch.setattr(sampling_module, "gumbel_noise", lambda *arguments: torch.tensor([best, worst]))
    assert choose_many(torch.tensor([-torch.inf, -1e4]), 2, temperature=1.0).tolist() == [0, 2]
    for filters in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert choose_many(torch.tensor([0.0, 1.0]), 2, temperature=1.0, **filters).tolist() == [0, 2]


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel_noise([0], torch.arange(300)[None], 0, 10_000)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.005)
    assert float(noise.var()) == pytest.approx(1.6449, abs=0.01)


def test_a_target_without_a_finite_logit_chooses_nothing() -> None:
    batch = ChoiceBatch(
        samplings=[SamplingParams(temperature=1.0)],
        histories=[None],
        positions_BN=torch.zeros(1, 1, dtype=torch.int64),
        tokens_BN=torch.zeros(1, 1, dtype=torch.int64),
        visibility_BNN=None,
    )
    assert choose_tokens(torch.full((1, 1, 4), torch.nan), batch, Parallel.single(), 0).tolist() == [[-1]]


def test_noise_depends_on_seed_position_and_token_only() -> None:
    positions = torch.tensor([[5, 9], [5, 2]])
    whole = gumbel_noise([1, 2], positions, 0, 96)
    assert torch.equal(gumbel_noise([1, 2], positions, 32, 32), whole[..., 32:64])
    assert torch.equal(gumbel_noise([2], torch.tensor([[5]]), 0, 96)[0, 0], whole[1, 0])
    assert not torch.equal(whole[0, 0], whole[1, 0])
    assert not torch.equal(whole[0, 0], whole[0, 1])


def test_noise_of_neighbouring_seeds_and_positions_is_unrelated() -> None:
    noise = gumbel_noise(list(range(40)), torch.arange(50).repeat(40, 1), 0, 200)
    centred = noise - noise.mean()
    for shifted in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(1, 2)):
        assert abs(float((centred * shifted).mean() / centred.var())) < 0.01


def test_noise_is_the_hash_that_it_says() -> None:
    """Repeat the hash in Python's own integers, which do not depend on how a device wraps around."""
    for seed, position, token in ((0, 0, 0), (123456789, 7, 95), (2**64 - 1, 2047, 151_000), (-5, 3, 2**20)):
        expected = -math.log(-math.log1p(-min((_hash(seed, position, token) + 0.5) / 2**31, 1 - 2**-24)))
        noise = gumbel_noise([seed], torch.tensor([[position]]), token, 1)
        assert float(noise) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def _hash(seed: int, position: int, token: int) -> int:
    low_64, low_32 = 2**64 - 1, 2**32 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & low_64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & low_64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) & low_64) + position * golden) & low_64)
    x = ((token * 0x9E3779B9) & low_32) ^ (key & low_32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D + (key >> 32)) & low_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low_32
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def test_top_k_keeps_the_lower_ids_among_equals() -> None:
    keep = allowed_tokens(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), SamplingParams(temperature=1.0, top_k=2))
    assert keep.tolist() == [[True, True, False, False]]


def test_penalties_follow_their_formulas_at_every_node() -> None:
    history = TokenHistory(0, 5, torch.device("cpu"))
    history.update([0, 1, 1, 2], num_prompt_tokens=2)
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits_NV = torch.tensor([[1.0, 1.0, -1.0, 1.0, 1.0]]).repeat(3, 1)
    # Nodes: the root (token 2, committed), its child 3, and that child's child 1.
    visibility_NN = torch.ones(3, 3, dtype=torch.bool).tril()
    penalised = penalise(logits_NV, sampling, history, torch.tensor([3, 1]), visibility_NN)
    root = [0.5, 0.5 - 0.5 - 0.25, -2.0 - 0.5 - 0.25, 1.0, 1.0]
    child = [*root[:3], 0.5 - 0.5 - 0.25, 1.0]
    grandchild = [root[0], 0.5 - 0.5 - 2 * 0.25, root[2], child[3], 1.0]
    torch.testing.assert_close(penalised, torch.tensor([root, child, grandchild]))


def test_sharded_penalties_are_slices_of_the_whole() -> None:
    tokens, draft, visibility_NN = [3, 1, 4, 1, 5], torch.tensor([6, 1]), torch.ones(3, 3, dtype=torch.bool).tril()
    sampling = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5)
    logits_NV = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for offset, size in ((0, 8), (0, 4), (4, 4)):
        history = TokenHistory(offset, size, torch.device("cpu"))
        history.update(tokens[:3], num_prompt_tokens=2)
        history.update(tokens, num_prompt_tokens=2)
        results.append(penalise(logits_NV[:, offset : offset + size], sampling, history, draft, visibility_NN))
    assert torch.equal(torch.cat(results[1:], dim=1), results[0])


def test_sample_and_match_emits_the_targets_distribution_exactly() -> None:
    """Enumerate every outcome of the choices at the nodes of a tree over 3 tokens."""
    generator = torch.Generator().manual_seed(1)
    table = {prefix: torch.rand(3, generator=generator, dtype=torch.float64) for n in range(3) for prefix in _strings(n)}
    target = {prefix: (p / p.sum()).tolist() for prefix, p in table.items()}
    tokens, parents, paths = [0, 2, 0, 1], [-1, 0, 0, 1], [(), (2,), (0,), (2, 1)]
    emitted = dict.fromkeys(_strings(3), 0.0)
    for choices in itertools.product(range(3), repeat=4):
        weight = 1.0
        for choice, path in zip(choices, paths, strict=True):
            weight *= target[path][choice]
        walk = walk_tree(
            torch.tensor([tokens]),
            torch.tensor([parents], dtype=torch.int32),
            torch.tensor([4], dtype=torch.int32),
            torch.tensor([choices]),
        )
        nodes = walk.path_BN[0, 1 : 1 + int(walk.num_accepted_B)].tolist()
        text = (*(tokens[node] for node in nodes), int(walk.bonus_tokens_B))
        for rest in itertools.product(range(3), repeat=3 - len(text)):
            emitted[(*text, *rest)] += weight * _probability(target, text, rest)
    exact = {text: _probability(target, (), text) for text in emitted}
    assert sum(abs(emitted[text] - exact[text]) for text in exact) / 2 < 1e-9


def _strings(length: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(3), repeat=length))


def _probability(target: dict[tuple[int, ...], list[float]], before: tuple[int, ...], text: tuple[int, ...]) -> float:
    result = 1.0
    for i, token in enumerate(text):
        result *= target[(*before, *text[:i])][token]
    return result


@pytest.fixture(scope="module")
def four_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with a vocabulary of 4, so that 3 emitted tokens can be counted."""
    return write_pair(tmp_path_factory.mktemp("four"), vocab_size=4)


@pytest.fixture(scope="module")
def exact_pairs(four_tokens: Path) -> torch.Tensor:
    """The target's own probability of each pair (second, third output token), given the first is free."""
    engine = engine_of(four_tokens, PLAIN)

    def next_distribution(tokens: list[int]) -> torch.Tensor:
        update = engine.generate([request_of("p", tokens, max_tokens=1, logprobs=4)])["p"][0]
        return torch.tensor([value for _, value in sorted(update.logprobs[0].top)]).double().exp()

    pairs = torch.zeros(4, 4, dtype=torch.float64)
    first = next_distribution(PROMPT)
    for a, b in itertools.product(range(4), repeat=2):
        pairs[b] += first[a] * next_distribution([*PROMPT, a])[b] * next_distribution([*PROMPT, a, b])
    return pairs.flatten()


PROMPT = [1, 3, 0, 2, 2]
TREE = TreeSetting(mode="tree", block_size=4, node_budget=9, top_k=4)


def count_pairs(folder: Path, setting: TreeSetting, num_samples: int) -> torch.Tensor:
    engine = engine_of(folder, setting, max_running_requests=100, max_total_tokens=8192)
    requests = [request_of(str(i), PROMPT, max_tokens=3, temperature=1.0, seed=i) for i in range(num_samples)]
    counts = torch.zeros(16, dtype=torch.float64)
    for updates in engine.generate(requests).values():
        _, second, third = tokens_of(updates)
        counts[4 * second + third] += 1
    assert setting.mode == "plain" or engine.stats().num_accepted > 0
    return counts


@pytest.mark.parametrize("setting", [PLAIN, TREE, TreeSetting(mode="linear", block_size=4)], ids=TreeSetting.label)
def test_emitted_tokens_at_temperature_1_pass_a_chi_square_test(
    four_tokens: Path, exact_pairs: torch.Tensor, setting: TreeSetting, record_property: Record
) -> None:
    check_follows(count_pairs(four_tokens, setting, 2_000), exact_pairs, record_property)


def _make_every_choice_greedy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampling_module, "gumbel_noise", lambda *arguments: 0.0)


def _make_the_walk_greedy(patch: pytest.MonkeyPatch) -> None:
    """The first token, which prefill chooses, is still sampled."""

    def choose(logits_BNV: torch.Tensor, batch: ChoiceBatch, *arguments: Any) -> torch.Tensor:
        greedy = dataclasses.replace(batch, samplings=[SamplingParams()] * len(batch.samplings))
        return choose_tokens(logits_BNV, greedy, *arguments)

    patch.setattr(round_module, "choose_tokens", choose)


def _make_the_walk_take_the_drafters_word(patch: pytest.MonkeyPatch) -> None:
    """A node that has a child follows its best one, whatever the target chose."""

    def walk(tokens_BN: torch.Tensor, parents_BN: torch.Tensor, num_nodes_B: torch.Tensor, choices_BN: torch.Tensor) -> Any:
        followed_BN = choices_BN.clone()
        for b, num_nodes in enumerate(num_nodes_B.tolist()):
            for node in reversed(range(1, num_nodes)):
                followed_BN[b, parents_BN[b, node]] = tokens_BN[b, node]
        return walk_tree(tokens_BN, parents_BN, num_nodes_B, followed_BN)

    patch.setattr(round_module, "walk_tree", walk)


@pytest.mark.parametrize(
    "make_greedy",
    [_make_every_choice_greedy, _make_the_walk_greedy, _make_the_walk_take_the_drafters_word],
    ids=["every-choice", "the-walks-choices", "the-drafters-word"],
)
def test_a_walk_that_is_made_greedy_fails_the_chi_square_test(
    four_tokens: Path,
    exact_pairs: torch.Tensor,
    make_greedy: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    make_greedy(monkeypatch)
    statistic, p_value = chi_square(count_pairs(four_tokens, TREE, 500), exact_pairs)
    record_property("chi-square", f"{statistic:.0f} at 15 degrees of freedom, p = {p_value:.3g}")
    assert p_value < 1e-12, f"a greedy walk must fail; chi-square {statistic:.2f}, p = {p_value:.3g}"
