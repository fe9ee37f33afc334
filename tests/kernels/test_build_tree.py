"""`build_tree`: a batch equals its sequences built alone, fillers, refusals; the Triton kernels equal the reference."""

import dataclasses

import numpy as np
import pytest
import torch

from ddtree_bench.kernels.build_tree import build_chain_batch, build_tree, reference
from ddtree_bench.kernels.build_tree.cases import BENCH_CASES, TEST_CASES, TreeCase
from ddtree_bench.tree import build_chain, build_ddtree_tree_from_topk, compile_ddtree_visibility, sibling_links

NAN = float("nan")
CHAIN_INPUTS = ("topk_logprobs_BDK", "topk_tokens_BDK", "root_tokens_B", "depth_B")


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
    batch = build_chain_batch(**{name: inputs[name] for name in CHAIN_INPUTS}, max_nodes=case.num_depths + 1 + room)
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
    with pytest.raises(ValueError, match=r"depth_B must be at most max_nodes - 1 = 6, got 7"):
        build_chain_batch(**{name: inputs[name] for name in CHAIN_INPUTS}, max_nodes=7)


@pytest.fixture
def kernels():
    """Give the Triton implementation, with memory filled before it is written."""
    from ddtree_bench.kernels.build_tree import triton_kernel

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield triton_kernel
    torch.use_deterministic_algorithms(was_deterministic)


def assert_same_trees(batch, expected):
    for field in dataclasses.fields(expected):
        values, expected_values = getattr(batch, field.name).cpu(), getattr(expected, field.name)
        assert values.dtype == expected_values.dtype
        assert torch.equal(values, expected_values), field.name


def check_trees(kernels, device, inputs, max_nodes):
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    batch = kernels.build_tree(**on_device, max_nodes=max_nodes)
    assert_same_trees(batch, reference.build_tree(**inputs, max_nodes=max_nodes))


@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_kernels_equal_the_reference(case, kernels, kernel_device):
    check_trees(kernels, kernel_device, case.make_inputs(seed=47), case.node_budget + 2)


@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_chain_kernels_equal_the_reference(case, kernels, kernel_device):
    inputs = case.make_inputs(seed=48)
    inputs = {name: inputs[name] for name in CHAIN_INPUTS}
    max_nodes = case.num_depths + 1
    on_device = {name: tensor.to(kernel_device) for name, tensor in inputs.items()}
    batch = kernels.build_chain_batch(**on_device, max_nodes=max_nodes)
    assert_same_trees(batch, reference.build_chain_batch(**inputs, max_nodes=max_nodes))


@pytest.mark.parametrize("num_levels", [1, 2])
@pytest.mark.parametrize("share_missing", [0.0, 0.3])
def test_kernels_order_ties_and_skip_what_cannot_be_selected(num_levels, share_missing, kernels, kernel_device):
    case = TreeCase(name="levels", batch_size=3, num_depths=4, top_k=3, node_budget=16, num_levels=num_levels)
    inputs = case.make_inputs(seed=49)
    generator = torch.Generator().manual_seed(50)
    is_missing_BDK = torch.rand(inputs["topk_logprobs_BDK"].shape, generator=generator) < share_missing
    inputs["topk_logprobs_BDK"][is_missing_BDK] = NAN
    inputs["topk_logprobs_BDK"][:, 1:, -1] = -torch.inf
    inputs["topk_tokens_BDK"][is_missing_BDK] = -1
    check_trees(kernels, kernel_device, inputs, case.node_budget + 1)


def test_kernels_add_in_float64_in_depth_order(kernels, kernel_device):
    # Sequence 0: float32 would call prefixes (0, 0) and (1) equal. Sequence 1: in depth order (0, 0, 0) and (1) are equal,
    # in another they are not.
    logprobs_BDK = -torch.tensor([[[1.0, 1.0], [1e-8, 0.1], [3e-8, 0.1]], [[1.0, 1.0], [2.0**-53, 1.0], [2.0**-53, 1.0]]])
    inputs = TreeCase(name="sums", batch_size=2, num_depths=3, top_k=2, node_budget=9).make_inputs(seed=51)
    check_trees(kernels, kernel_device, inputs | {"topk_logprobs_BDK": logprobs_BDK}, 10)


@pytest.mark.parametrize(
    ("num_depths", "top_k", "node_budget", "max_nodes"), [(0, 3, 4, 5), (3, 0, 4, 5), (3, 2, 0, 1), (31, 1, 32, 131)]
)
def test_kernels_at_the_limits(num_depths, top_k, node_budget, max_nodes, kernels, kernel_device):
    case = TreeCase(name="limits", batch_size=1, num_depths=num_depths, top_k=top_k, node_budget=node_budget)
    check_trees(kernels, kernel_device, case.make_inputs(seed=52), max_nodes)


def test_kernels_at_the_most_nodes(kernels, kernel_device):
    # The root's place in post-order is 1,024, the one that needs an eleventh bit.
    case = TreeCase(name="most", batch_size=2, num_depths=31, top_k=64, node_budget=1024, num_levels=40)
    inputs = case.make_inputs(seed=62)
    check_trees(kernels, kernel_device, {name: tensor[:1] for name, tensor in inputs.items()}, 1025)


def test_kernels_take_strided_tables_wide_integers_and_caps_beyond_the_room(kernels, kernel_device):
    case = TreeCase(name="room", batch_size=2, num_depths=3, top_k=64, node_budget=70)
    inputs = case.make_inputs(seed=53)
    expected = reference.build_tree(**inputs, max_nodes=71)
    strided = {name: inputs[name].permute(2, 0, 1).contiguous().permute(1, 2, 0) for name in CHAIN_INPUTS[:2]}
    wide = {
        "node_budget_B": torch.tensor([2**40, 69]),
        "depth_B": torch.tensor([2**40, 2]),
        "branching_B": torch.tensor([2**40, 63]),
    }
    on_device = {name: tensor.to(kernel_device) for name, tensor in (inputs | strided | wide).items()}
    assert_same_trees(kernels.build_tree(**on_device, max_nodes=71), expected)


def test_kernels_on_an_empty_batch(kernels, kernel_device):
    inputs = {name: tensor[:0].to(kernel_device) for name, tensor in TEST_CASES[2].make_inputs(seed=54).items()}
    assert kernels.build_tree(**inputs, max_nodes=5).visibility_BNN.shape == (0, 5, 5)


@pytest.mark.parametrize(
    ("shape", "max_nodes", "message"),
    [
        ((1, 2, 3), 1026, r"max_nodes must be at most 1025 on a GPU, got 1026; lower it"),
        ((1, 32, 3), 9, r"the number of draft depths must be at most 31 on a GPU, got 32"),
        ((1, 2, 65), 9, r"the number of candidates of a depth must be at most 64 on a GPU, got 65"),
    ],
)
def test_kernels_refuse_what_their_integers_cannot_hold(shape, max_nodes, message, kernels):
    inputs = TreeCase(name="big", batch_size=shape[0], num_depths=shape[1], top_k=shape[2], node_budget=3).make_inputs(seed=55)
    with pytest.raises(ValueError, match=message):
        kernels.build_tree(**inputs, max_nodes=max_nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("num_levels", [0, 1, 3, 40])
@pytest.mark.parametrize("case", BENCH_CASES, ids=[case.name for case in BENCH_CASES])
def test_kernels_equal_the_reference_at_full_size(case, num_levels, kernels):
    inputs = dataclasses.replace(case, num_levels=num_levels).make_inputs(seed=56)
    check_trees(kernels, "cuda", inputs, case.node_budget + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@pytest.mark.parametrize("splits_cost", [True, False])
def test_configs_change_no_tree(num_warps, splits_cost, kernels):
    inputs = TreeCase(name="many", batch_size=200, num_depths=9, top_k=5, node_budget=150, num_levels=4).make_inputs(seed=57)
    on_device = {name: tensor.cuda() for name, tensor in inputs.items()}
    config = kernels.BuildConfig(num_warps=num_warps, splits_cost=splits_cost)
    batch = kernels.build_tree(**on_device, max_nodes=151, config=config)
    assert_same_trees(batch, reference.build_tree(**inputs, max_nodes=151))


@pytest.mark.gpu
def test_replays_of_a_graph_follow_what_lies_on_the_device():
    case = TreeCase(name="replay", batch_size=3, num_depths=7, top_k=8, node_budget=64, num_levels=9)
    held = case.make_inputs(seed=58, device="cuda")
    build_tree(**held, max_nodes=65)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = build_tree(**held, max_nodes=65)
    for seed, node_budget in ((59, 64), (60, 17), (61, 0)):
        inputs = dataclasses.replace(case, node_budget=node_budget).make_inputs(seed=seed)
        for name, tensor in inputs.items():
            held[name].copy_(tensor)
        graph.replay()
        assert_same_trees(batch, reference.build_tree(**inputs, max_nodes=65))
