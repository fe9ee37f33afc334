"""`build_tree`: a batch equals its sequences built alone, fillers, refusals."""

import numpy as np
import pytest
import torch

from ddtree_bench.kernels.build_tree import build_chain_batch, build_tree
from ddtree_bench.kernels.build_tree.cases import TEST_CASES
from ddtree_bench.tree import build_chain, build_ddtree_tree_from_topk, compile_ddtree_visibility, sibling_links

NAN = float("nan")


def assert_row_equals(batch, row, tree):
    num_nodes = tree.num_nodes
    links = sibling_links(tree)
    assert batch.num_nodes_B[row] == num_nodes
    for name, expected, filler in (
        ("tokens_BN", tree.tokens_N, 0),
        ("parents_BN", tree.parents_N, -1),
        ("depths_BN", tree.depths_N, 0),
        ("scores_BN", tree.scores_N, 0),
        ("first_child_BN", links.first_child_N, -1),
        ("next_sibling_BN", links.next_sibling_N, -1),
    ):
        values_N = getattr(batch, name)[row].numpy()
        assert values_N.dtype == expected.dtype
        np.testing.assert_array_equal(values_N[:num_nodes], expected, err_msg=name)
        assert (values_N[num_nodes:] == filler).all()
    visibility_NN = batch.visibility_BNN[row].numpy()
    np.testing.assert_array_equal(visibility_NN[:num_nodes, :num_nodes], compile_ddtree_visibility(tree)[0])
    assert visibility_NN.sum() == visibility_NN[:num_nodes, :num_nodes].sum()


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_batch_equals_each_sequence_alone(case, room):
    inputs = case.make_inputs(seed=41)
    batch = build_tree(**inputs, max_nodes=case.node_budget + 1 + room)
    for row in range(case.batch_size):
        tree = build_ddtree_tree_from_topk(
            inputs["topk_logprobs_BDK"][row].numpy(),
            inputs["topk_tokens_BDK"][row].numpy(),
            node_budget=int(inputs["node_budget_B"][row]),
            depth=int(inputs["depth_B"][row]),
            branching=int(inputs["branching_B"][row]),
            root_token=int(inputs["root_tokens_B"][row]),
        )
        assert_row_equals(batch, row, tree)


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_chains_equal_each_sequence_alone(case, room):
    inputs = case.make_inputs(seed=42)
    names = ("topk_logprobs_BDK", "topk_tokens_BDK", "root_tokens_B", "depth_B")
    batch = build_chain_batch(**{name: inputs[name] for name in names}, max_nodes=case.num_depths + 1 + room)
    for row in range(case.batch_size):
        chain = build_chain(
            inputs["topk_logprobs_BDK"][row].numpy(),
            inputs["topk_tokens_BDK"][row].numpy(),
            depth=int(inputs["depth_B"][row]),
            root_token=int(inputs["root_tokens_B"][row]),
        )
        assert_row_equals(batch, row, chain)


def test_a_sequence_with_nothing_to_select_is_its_root_alone():
    inputs = TEST_CASES[2].make_inputs(seed=43)
    inputs["topk_logprobs_BDK"][1] = NAN
    batch = build_tree(**inputs, max_nodes=22)
    assert batch.num_nodes_B.tolist() == [22, 1, 20, 19, 18]
    assert batch.tokens_BN[1, 0] == inputs["root_tokens_B"][1]


def test_an_empty_batch():
    inputs = {name: tensor[:0] for name, tensor in TEST_CASES[2].make_inputs(seed=44).items()}
    assert build_tree(**inputs, max_nodes=5).visibility_BNN.shape == (0, 5, 5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_nodes": 21}, ValueError, r"node_budget_B must be at most max_nodes - 1 = 20, got 21"),
        ({"max_nodes": 0}, ValueError, r"max_nodes must be at least 1, got 0"),
        ({"depth_B": torch.ones(4).int()}, ValueError, r"depth_B must have shape \(5\), got \(4,\)"),
        ({"branching_B": torch.zeros(5).int()}, ValueError, r"branching must be at least 1, got 0"),
        ({"node_budget_B": torch.ones(5)}, TypeError, r"node_budget_B must be int32 or int64, got float32"),
        ({"topk_logprobs_BDK": torch.zeros(5, 7, 3).double()}, TypeError, r"topk_logprobs_BDK must be float32, got float64"),
        ({"topk_tokens_BDK": torch.zeros(5, 7, 4).long()}, ValueError, r"shape \(5, 7, 3\), got \(5, 7, 4\)"),
    ],
)
def test_refusals(changes, error, message):
    with pytest.raises(error, match=message):
        build_tree(**TEST_CASES[2].make_inputs(seed=45) | {"max_nodes": 22} | changes)


def test_chain_refuses_a_depth_without_room():
    inputs = TEST_CASES[2].make_inputs(seed=46)
    names = ("topk_logprobs_BDK", "topk_tokens_BDK", "root_tokens_B", "depth_B")
    with pytest.raises(ValueError, match=r"depth_B must be at most max_nodes - 1 = 6, got 7"):
        build_chain_batch(**{name: inputs[name] for name in names}, max_nodes=7)
