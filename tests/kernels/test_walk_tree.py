"""`walk_tree`: a batch equals its sequences walked alone; lengths, not fillers, end a tree; the kernel equals the reference."""

import pytest
import torch

from ddtree_bench.kernels.build_tree import build_tree
from ddtree_bench.kernels.build_tree.cases import TEST_CASES as TREE_CASES
from ddtree_bench.kernels.walk_tree import reference, walk_tree
from ddtree_bench.kernels.walk_tree.cases import TEST_CASES
from ddtree_bench.tree import build_ddtree_tree_from_topk, follow_verified_tree


def padded(path, width):
    return [*path, *[-1] * (width - len(path))]


@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_accepted_lengths_and_bonus_of_each_sequence(case):
    inputs = case.make_inputs(seed=51)
    walks = walk_tree(**inputs)
    assert walks.num_accepted_B.tolist() == list(case.num_accepted)
    for row, num_accepted in enumerate(case.num_accepted):
        path = walks.path_BN[row].tolist()
        assert path == padded(path[: num_accepted + 1], case.max_nodes)
        assert path[0] == 0
        assert max(path) < case.num_nodes[row]
        assert walks.bonus_tokens_B[row] == inputs["target_tokens_BN"][row, path[num_accepted]]
    assert (walks.path_BN.dtype, walks.num_accepted_B.dtype, walks.bonus_tokens_B.dtype) == (
        torch.int32,
        torch.int32,
        torch.int64,
    )


@pytest.mark.parametrize("case", TREE_CASES, ids=[case.name for case in TREE_CASES])
def test_equals_the_walk_of_one_sequence(case):
    inputs = case.make_inputs(seed=52)
    max_nodes = case.node_budget + 4
    batch = build_tree(**inputs, max_nodes=max_nodes)
    generator = torch.Generator().manual_seed(53)
    for _ in range(20):
        targets_BN = torch.randint(case.top_k + 5, (case.batch_size, max_nodes), generator=generator)
        walks = walk_tree(batch.tokens_BN, batch.parents_BN, batch.num_nodes_B, targets_BN)
        for row in range(case.batch_size):
            tree = build_ddtree_tree_from_topk(
                inputs["topk_logprobs_BDK"][row].numpy(),
                inputs["topk_tokens_BDK"][row].numpy(),
                node_budget=int(inputs["node_budget_B"][row]),
                depth=int(inputs["depth_B"][row]),
                branching=int(inputs["branching_B"][row]),
            )
            walk = follow_verified_tree(tree, targets_BN[row, : tree.num_nodes].numpy())
            assert walks.path_BN[row].tolist() == padded(walk.node_indices, max_nodes)
            assert int(walks.num_accepted_B[row]) == walk.num_accepted
            assert int(walks.bonus_tokens_B[row]) == walk.bonus_token


def test_token_0_beyond_num_nodes_is_not_a_node():
    tokens_BN = torch.tensor([[5, 0, 0, 0]])
    parents_BN = torch.tensor([[-1, 0, 1, 1]], dtype=torch.int32)
    walks = walk_tree(tokens_BN, parents_BN, torch.tensor([2], dtype=torch.int32), torch.zeros_like(tokens_BN))
    assert walks.path_BN.tolist() == [[0, 1, -1, -1]]


def test_refusals():
    inputs = TEST_CASES[1].make_inputs(seed=54)
    with pytest.raises(TypeError, match=r"parents_BN must be int32, got int64"):
        walk_tree(**inputs | {"parents_BN": inputs["parents_BN"].long()})
    with pytest.raises(ValueError, match=r"target_tokens_BN must have shape \(3, 64\), got \(3, 63\)"):
        walk_tree(**inputs | {"target_tokens_BN": inputs["target_tokens_BN"][:, 1:]})
    empty = {name: tensor[:, :0] for name, tensor in inputs.items() if name != "num_nodes_B"}
    with pytest.raises(ValueError, match=r"room for the root, got shape \(3, 0\)"):
        walk_tree(**empty, num_nodes_B=inputs["num_nodes_B"])


def assert_kernel_equals_reference(inputs):
    from ddtree_bench.kernels.walk_tree import triton_kernel

    walks, expected = triton_kernel.walk_tree(**inputs), reference.walk_tree(**inputs)
    for name in ("path_BN", "num_accepted_B", "bonus_tokens_B"):
        found, wanted = getattr(walks, name), getattr(expected, name)
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_kernel(case, kernel_device):
    inputs = case.make_inputs(seed=55, device=kernel_device)
    assert_kernel_equals_reference(inputs)
    assert_kernel_equals_reference(inputs | {"num_nodes_B": inputs["num_nodes_B"].long()})


@pytest.mark.parametrize("width", [1, 2, 33, 600])
def test_kernel_on_random_trees_with_equal_siblings(width, kernel_device):
    """Few tokens, so that siblings repeat and the lowest must win; some columns lie beyond the tree."""
    generator = torch.Generator().manual_seed(56)
    parents_BN = torch.stack([(torch.rand(width, generator=generator) * torch.arange(width)).int() for _ in range(3)])
    parents_BN[:, 0] = -1
    inputs = {
        "tokens_BN": torch.randint(3, (3, width), generator=generator),
        "parents_BN": parents_BN,
        "num_nodes_B": torch.tensor([width, max(1, width - 5), 1], dtype=torch.int32),
        "target_tokens_BN": torch.randint(3, (3, width), generator=generator),
    }
    assert_kernel_equals_reference({name: tensor.to(kernel_device) for name, tensor in inputs.items()})


def test_kernel_reads_strided_tensors(kernel_device):
    inputs = TEST_CASES[1].make_inputs(seed=57, device=kernel_device)
    strided = {name: torch.stack([tensor, tensor], dim=-1)[..., 0] for name, tensor in inputs.items()}
    assert not strided["tokens_BN"].is_contiguous()
    assert_kernel_equals_reference(strided)
