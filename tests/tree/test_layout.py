"""Results do not depend on the layout in which a tree is kept."""

import numpy as np
import pytest

from ddtree_bench.tree import (
    breadth_first_order,
    build_ddtree_tree_from_topk,
    compile_ddtree_visibility,
    follow_verified_tree,
    permute_tree,
    sibling_links,
)


def random_tree(seed, node_budget):
    rng = np.random.default_rng(seed)
    logprobs_DK = -np.sort(rng.exponential(size=(5, 4)), axis=1).astype(np.float32)
    tokens_DK = np.array([rng.permutation(7)[:4] for _ in range(5)])
    return build_ddtree_tree_from_topk(logprobs_DK, tokens_DK, node_budget=node_budget)


def random_order(tree, rng):
    """Draw an order in which parents come before children."""
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop(rng.integers(len(waiting)))
        order.append(node)
        waiting += np.flatnonzero(tree.parents_N == node).tolist()
    return np.array(order)


@pytest.mark.parametrize("node_budget", [0, 1, 13, 40])
@pytest.mark.parametrize("layout", ["breadth-first", "random"])
def test_walk_and_visibility_follow_the_permutation(node_budget, layout):
    tree = random_tree(11, node_budget)
    rng = np.random.default_rng(12)
    order_N = breadth_first_order(tree) if layout == "breadth-first" else random_order(tree, rng)
    permuted = permute_tree(tree, order_N)

    visibility_NN, positions_N = compile_ddtree_visibility(tree)
    permuted_visibility_NN, permuted_positions_N = compile_ddtree_visibility(permuted)
    np.testing.assert_array_equal(permuted_visibility_NN, visibility_NN[np.ix_(order_N, order_N)])
    np.testing.assert_array_equal(permuted_positions_N, positions_N[order_N])
    for _ in range(50):
        targets_N = rng.integers(0, 7, size=tree.num_nodes)
        walk, permuted_walk = follow_verified_tree(tree, targets_N), follow_verified_tree(permuted, targets_N[order_N])
        assert order_N[list(permuted_walk.node_indices)].tolist() == list(walk.node_indices)
        assert (permuted_walk.num_accepted, permuted_walk.bonus_token) == (walk.num_accepted, walk.bonus_token)


def test_breadth_first_keeps_levels_and_siblings_together():
    tree = permute_tree(random_tree(13, 40), breadth_first_order(random_tree(13, 40)))
    assert (np.diff(tree.depths_N) >= 0).all()
    assert (np.diff(tree.parents_N[1:]) >= 0).all()


@pytest.mark.parametrize("node_budget", [0, 1, 13, 40])
def test_links_list_the_children_in_node_order(node_budget):
    tree = random_tree(14, node_budget)
    links = sibling_links(tree)
    for node in range(tree.num_nodes):
        children, child = [], links.first_child_N[node]
        while child != -1:
            children.append(child)
            child = links.next_sibling_N[child]
        assert children == np.flatnonzero(tree.parents_N == node).tolist()


def test_an_order_that_is_no_permutation_is_refused():
    with pytest.raises(ValueError, match="each of the 3 nodes once"):
        permute_tree(random_tree(15, 2), np.array([0, 1, 1]))
