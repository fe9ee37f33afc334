"""Builders: an example by hand, brute force on small tables, edges and refusals."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_bench.tree import build_chain, build_ddtree_tree_from_topk, compile_ddtree_visibility, follow_verified_tree

INF = float("inf")
NAN = float("nan")


def table(rows, tokens=None):
    logprobs_DK = np.array(rows, dtype=np.float32)
    tokens_DK = np.tile(np.arange(logprobs_DK.shape[1]), (len(rows), 1)) if tokens is None else np.array(tokens)
    return logprobs_DK, tokens_DK


def ranks_of(tree, tokens_DK):
    """Give each node's ranks from the root, read back from tokens and parents."""
    ranks = [()]
    for node in range(1, tree.num_nodes):
        rank = tokens_DK[tree.depths_N[node] - 1].tolist().index(tree.tokens_N[node])
        ranks.append((*ranks[tree.parents_N[node]], rank))
    return ranks[1:]


def brute_force(logprobs_DK, node_budget, depth, branching):
    """List every allowed prefix with its score, sort by the rule, keep the first ones."""
    num_depths = len(logprobs_DK) if depth is None else min(depth, len(logprobs_DK))
    usable = [[rank for rank, value in enumerate(row) if value > -INF] for row in logprobs_DK]  # NaN compares false
    prefixes = []
    for prefix_depth in range(1, num_depths + 1):
        choices = [row if branching is None or place == 0 else row[:branching] for place, row in enumerate(usable)]
        for ranks in product(*choices[:prefix_depth]):
            score = 0.0
            for row, rank in zip(logprobs_DK, ranks, strict=False):
                score += float(row[rank])
            prefixes.append((-score, ranks))
    return sorted(prefixes)[:node_budget]


def assert_is_best(logprobs_DK, tokens_DK, node_budget, depth, branching):
    tree = build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, node_budget=node_budget, depth=depth, branching=branching)
    expected = brute_force(logprobs_DK, node_budget, depth, branching)
    assert ranks_of(tree, tokens_DK) == [ranks for _, ranks in expected]
    np.testing.assert_array_equal(tree.scores_N[1:], np.array([-score for score, _ in expected], dtype=np.float32))
    return tree


def test_example_by_hand():
    # Depth 1: a −0.5, b −1.0. Depth 2: c −0.25, d −2.0.
    # a −0.5, ac −0.75, b −1.0, bc −1.25, ad −2.5, bd −3.0.
    logprobs_DK, tokens_DK = table([[-0.5, -1.0], [-0.25, -2.0]], [[10, 11], [12, 13]])
    tree = build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, node_budget=5, root_token=7)
    assert tree.tokens_N.tolist() == [7, 10, 12, 11, 12, 13]
    assert tree.parents_N.tolist() == [-1, 0, 1, 0, 3, 1]
    assert tree.depths_N.tolist() == [0, 1, 2, 1, 2, 2]
    assert tree.scores_N.tolist() == [0.0, -0.5, -0.75, -1.0, -1.25, -2.5]
    assert (tree.num_nodes, tree.num_draft_tokens) == (6, 5)
    assert (tree.tokens_N.dtype, tree.parents_N.dtype) == (np.int64, np.int32)
    assert (tree.depths_N.dtype, tree.scores_N.dtype) == (np.int32, np.float32)


def test_ties_take_the_smaller_ranks_and_a_prefix_before_its_extensions():
    logprobs_DK, tokens_DK = table([[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
    tree = build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, node_budget=6)
    assert ranks_of(tree, tokens_DK) == [(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 0)]


def test_scores_are_added_in_float64_from_the_float32_table():
    # In float32 every sum would round to −1 and the ranks alone would decide: (0), (0, 0), (0, 1).
    small = 2.0**-30
    logprobs_DK, tokens_DK = table([[-1.0, -1.0], [-small, -2 * small]])
    tree = assert_is_best(logprobs_DK, tokens_DK, 5, None, None)
    assert ranks_of(tree, tokens_DK) == [(0,), (1,), (0, 0), (1, 0), (0, 1)]
    assert tree.scores_N.tolist() == [0.0, -1.0, -1.0, -1.0, -1.0, -1.0]


def test_branching_caps_children_below_the_root_only():
    logprobs_DK, tokens_DK = table([[-1.0, -1.1, -1.2], [-0.1, -0.2, -0.3], [-0.1, -0.2, -0.3]])
    tree = assert_is_best(logprobs_DK, tokens_DK, 100, None, 2)
    num_children = np.bincount(tree.parents_N[1:], minlength=tree.num_nodes)
    assert num_children[0] == 3
    assert set(num_children[1:].tolist()) == {0, 2}
    assert tree.num_nodes == 1 + 3 + 3 * 2 + 3 * 2 * 2


def test_branching_counts_selectable_children():
    logprobs_DK, tokens_DK = table([[-1.0, -1.1, -1.2], [-0.1, NAN, -0.3]])
    tree = assert_is_best(logprobs_DK, tokens_DK, 100, None, 2)
    assert set(tree.tokens_N[tree.depths_N == 2].tolist()) == {0, 2}


@pytest.mark.parametrize("node_budget", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 9, None])
def test_size_one_and_caps(node_budget, depth):
    logprobs_DK, tokens_DK = table([[-0.7]] * 3, [[0], [0], [5]])
    tree = assert_is_best(logprobs_DK, tokens_DK, node_budget, depth, 1)
    num_draft_tokens = min(node_budget, 3 if depth is None else min(3, depth))
    assert tree.parents_N.tolist() == list(range(-1, num_draft_tokens))
    assert tree.tokens_N.tolist() == [0, 0, 0, 5][: num_draft_tokens + 1]


def test_budget_0_and_an_empty_table_give_the_root_alone():
    logprobs_DK, tokens_DK = table([[-0.7, -0.8]])
    for tree in (
        build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, node_budget=0, root_token=3),
        build_ddtree_tree_from_topk(logprobs_DK[:0], tokens_DK[:0], node_budget=9, root_token=3),
        build_ddtree_tree_from_topk(logprobs_DK[:, :0], tokens_DK[:, :0], node_budget=9, root_token=3),
        build_chain(logprobs_DK[:0], tokens_DK[:0], root_token=3),
        build_chain(logprobs_DK, tokens_DK, depth=0, root_token=3),
    ):
        assert (tree.num_nodes, tree.tokens_N.tolist()) == (1, [3])
        assert follow_verified_tree(tree, np.array([8])).node_indices == (0,)
        assert compile_ddtree_visibility(tree)[0].tolist() == [[True]]


@pytest.mark.parametrize(
    ("rows", "num_draft_tokens"),
    [
        ([[-0.5, -INF], [-0.5, -0.6]], 3),
        ([[-INF, -INF], [-0.5, -0.6]], 0),
        ([[-0.5, -0.6], [NAN, NAN], [0.0, -1.0]], 2),
        ([[NAN, -0.6], [-0.5, NAN]], 2),
        ([[-INF, -0.6], [NAN, -0.5]], 2),
    ],
    ids=["inf-tail", "inf-row", "nan-row", "nan-anywhere", "inf-first"],
)
def test_nan_and_minus_infinity_are_never_selected(rows, num_draft_tokens):
    logprobs_DK, tokens_DK = table(rows)
    tree = assert_is_best(logprobs_DK, tokens_DK, 100, None, None)
    assert tree.num_draft_tokens == num_draft_tokens
    assert np.isfinite(tree.scores_N).all()
    assert np.isfinite(build_chain(logprobs_DK, tokens_DK).scores_N).all()


def test_unselectable_candidates_may_carry_any_token():
    logprobs_DK, tokens_DK = table([[-0.5, -INF, -INF]], [[4, -1, -1]])
    assert build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, node_budget=9).tokens_N.tolist() == [0, 4]


def test_chain_is_the_argmax_of_each_depth():
    logprobs_DK, tokens_DK = table([[-0.5, -0.6], [-0.25, -2.0], [NAN, -1.0]], [[3, 4], [0, 1], [8, 9]])
    tree = build_chain(logprobs_DK, tokens_DK, root_token=2)
    assert tree.tokens_N.tolist() == [2, 3, 0, 9]
    assert tree.parents_N.tolist() == [-1, 0, 1, 2]
    assert tree.scores_N.tolist() == [0.0, -0.5, -0.75, -1.75]
    assert build_chain(logprobs_DK, tokens_DK, depth=1).num_nodes == 2


@pytest.mark.parametrize(
    ("rows", "tokens", "options", "error", "message"),
    [
        ([[-2.0, -1.0]], None, {}, ValueError, r"must not increase along a row, but row 0 has -1.0 after -2.0"),
        ([[-2.0, NAN, -1.0]], None, {}, ValueError, r"must not increase along a row"),
        ([[0.5, -1.0]], None, {}, ValueError, r"at most 0, got 0.5 in row 0"),
        ([[INF, -1.0]], None, {}, ValueError, r"at most 0, got inf in row 0"),
        ([[-1.0, -2.0]], [[4, 4]], {}, ValueError, r"must not repeat a token in a row, but row 0 has 4 twice"),
        ([[-1.0, -2.0]], [[4, -4]], {}, ValueError, r"token ids of at least 0 .* got -4 in row 0"),
        ([[-1.0, -2.0]], [[4, 5, 6]], {}, ValueError, r"one shape \[D, K\], got \(1, 2\) and \(1, 3\)"),
        ([[-1.0]], [[0.5]], {}, TypeError, r"topk_tokens_DK must hold integers, got float64"),
        ([[-1.0]], None, {"node_budget": -1}, ValueError, r"node_budget must be at least 0, got -1"),
        ([[-1.0]], None, {"node_budget": 2.0}, TypeError, r"node_budget must be an integer, got 2.0"),
        ([[-1.0]], None, {"depth": -1}, ValueError, r"depth must be at least 0, got -1"),
        ([[-1.0]], None, {"branching": 0}, ValueError, r"branching must be at least 1, got 0"),
        ([[-1.0]], None, {"branching": True}, TypeError, r"branching must be an integer, got True"),
    ],
)
def test_refusals(rows, tokens, options, error, message):
    logprobs_DK, tokens_DK = table(rows, tokens)
    with pytest.raises(error, match=message):
        build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, **{"node_budget": 3} | options)


@st.composite
def small_problems(draw):
    """Draw a table with many equal scores, −inf and NaN, and caps around its size."""
    num_depths, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    value = st.one_of(
        st.sampled_from([0.0, -0.25, -0.5, -1.0, -INF]),
        st.floats(-8, 0, width=32).map(lambda value: value + 0.0),
    )
    rows = [sorted(draw(st.lists(value, min_size=top_k, max_size=top_k)), reverse=True) for _ in range(num_depths)]
    if draw(st.booleans()):
        rows[draw(st.integers(0, num_depths - 1))][draw(st.integers(0, top_k - 1))] = NAN
    tokens = [draw(st.permutations(range(6)))[:top_k] for _ in range(num_depths)]
    depth = draw(st.one_of(st.none(), st.integers(0, 5)))
    branching = draw(st.one_of(st.none(), st.integers(1, 5)))
    return *table(rows, tokens), draw(st.integers(0, 40)), depth, branching


@settings(max_examples=150, deadline=None)
@given(small_problems())
def test_tree_is_the_best_prefixes(problem):
    logprobs_DK, tokens_DK, node_budget, depth, branching = problem
    tree = assert_is_best(logprobs_DK, tokens_DK, node_budget, depth, branching)
    assert tree.num_draft_tokens <= node_budget
    assert (tree.parents_N[1:] < np.arange(1, tree.num_nodes)).all()


@settings(max_examples=150, deadline=None)
@given(small_problems(), st.data())
def test_tree_accepts_at_least_the_part_of_the_chain_that_it_contains(problem, data):
    logprobs_DK, tokens_DK, node_budget, depth, branching = problem
    tree = build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, node_budget=node_budget, depth=depth, branching=branching)
    chain = build_chain(logprobs_DK, tokens_DK, depth=depth)
    truth = data.draw(st.lists(st.integers(0, 5), min_size=6, max_size=6))
    contained = follow_verified_tree(tree, chain_targets(tree, chain)).num_accepted
    by_depth = np.array(truth)
    accepted_by_tree = follow_verified_tree(tree, by_depth[tree.depths_N]).num_accepted
    accepted_by_chain = follow_verified_tree(chain, by_depth[chain.depths_N]).num_accepted
    assert accepted_by_tree >= min(accepted_by_chain, contained)


def chain_targets(tree, chain):
    """Give each node the chain's next token, so that a walk measures the part of the chain in the tree."""
    next_tokens = np.full(int(tree.depths_N.max()) + chain.num_nodes + 1, -1)
    next_tokens[: chain.num_nodes - 1] = chain.tokens_N[1:]
    return next_tokens[tree.depths_N]
