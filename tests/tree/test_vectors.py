"""Every vector of tests/cases/trees.json, exactly."""

import json
from pathlib import Path

import numpy as np
import pytest

from ddtree_bench.tree import build_ddtree_tree_from_topk, compile_ddtree_visibility, follow_verified_tree

VECTORS = json.loads((Path(__file__).parents[1] / "cases" / "trees.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_vector(vector):
    tree = build_ddtree_tree_from_topk(
        np.array(vector["topk_logprobs"], dtype=np.float32),
        np.array(vector["topk_tokens"], dtype=np.int64),
        node_budget=vector["node_budget"],
        depth=vector["depth"],
        branching=vector["branching"],
    )
    expect, expected_walk = vector["expect"], vector["walk"]
    assert tree.parents_N.tolist() == expect["parents"]
    assert tree.depths_N.tolist() == expect["depths"]
    assert [None, *tree.tokens_N[1:].tolist()] == expect["tokens"]
    np.testing.assert_array_equal(tree.scores_N, np.array(expect["scores"], dtype=np.float32))

    visibility_NN, positions_N = compile_ddtree_visibility(tree)
    assert [np.flatnonzero(row).tolist() for row in visibility_NN] == expect["ancestors"]
    assert positions_N.tolist() == expect["depths"]

    walk = follow_verified_tree(tree, np.array(expected_walk["target_tokens"]))
    assert list(walk.node_indices) == expected_walk["node_indices"]
    assert walk.num_accepted == expected_walk["num_accepted"]
    assert walk.bonus_token == expected_walk["bonus_token"]
