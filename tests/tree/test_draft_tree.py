"""What a DraftTree and a Walk refuse."""

import numpy as np
import pytest

from ddtree_bench.tree import DraftTree, Walk, follow_verified_tree


def draft_tree(**changes):
    fields = {
        "tokens_N": np.array([0, 5, 6, 5], dtype=np.int64),
        "parents_N": np.array([-1, 0, 0, 1], dtype=np.int32),
        "depths_N": np.array([0, 1, 1, 2], dtype=np.int32),
        "scores_N": np.array([0, -1, -2, -3], dtype=np.float32),
    }
    for name, values in changes.items():
        fields[name] = values if isinstance(values, np.ndarray) else np.array(values, dtype=fields[name].dtype)
    return DraftTree(**fields)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens_N": np.zeros(4, dtype=np.int32)}, TypeError, r"tokens_N must be a numpy array of int64, got int32"),
        ({"scores_N": [0, -1]}, ValueError, r"scores_N must have one entry a node .* got shape \(2,\)"),
        ({"parents_N": [0, 0, 0, 1]}, ValueError, r"node 0 must be the root"),
        ({"parents_N": [-1, 0, 3, 1]}, ValueError, r"node 2 has parent 3"),
        ({"parents_N": [-1, 0, -1, 1]}, ValueError, r"node 2 has parent -1"),
        ({"depths_N": [0, 1, 1, 3]}, ValueError, r"node 3 has 3 under a parent of depth 1"),
        ({"tokens_N": [0, 5, 5, 5]}, ValueError, r"two children of node 0 carry 5"),
    ],
)
def test_broken_trees_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        draft_tree(**changes)


def test_walk_by_hand():
    tree = draft_tree()
    assert follow_verified_tree(tree, np.array([5, 5, 9, 9])) == Walk(node_indices=(0, 1, 3), num_accepted=2, bonus_token=9)
    assert follow_verified_tree(tree, np.array([6, 5, 1, 9])) == Walk(node_indices=(0, 2), num_accepted=1, bonus_token=1)
    assert follow_verified_tree(tree, np.array([0, 5, 1, 9])) == Walk(node_indices=(0,), num_accepted=0, bonus_token=0)


def test_token_0_is_an_ordinary_token():
    tree = draft_tree(tokens_N=[0, 0, 6, 0])
    assert follow_verified_tree(tree, np.array([0, 0, 1, 0])).node_indices == (0, 1, 3)


def test_walk_refusals():
    with pytest.raises(ValueError, match=r"one token a node \(4\), got shape \(3,\)"):
        follow_verified_tree(draft_tree(), np.array([1, 2, 3]))
    with pytest.raises(TypeError, match=r"must hold integers, got float64"):
        follow_verified_tree(draft_tree(), np.array([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(ValueError, match=r"num_accepted=2"):
        Walk(node_indices=(0, 1), num_accepted=2, bonus_token=3)
