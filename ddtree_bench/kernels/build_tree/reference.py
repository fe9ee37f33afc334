"""Reference of `build_tree`: `ddtree_bench.tree`, one sequence after the other.

Letters: B sequences, D draft depths, K candidates of a depth, N room for nodes of a tree.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ddtree_bench.kernels.build_tree.tree_batch import TreeBatch
from ddtree_bench.tree import (
    DraftTree,
    build_chain,
    build_ddtree_tree_from_topk,
    compile_ddtree_visibility,
    sibling_links,
)


def build_tree(
    topk_logprobs_BDK: torch.Tensor,
    topk_tokens_BDK: torch.Tensor,
    root_tokens_B: torch.Tensor,
    *,
    node_budget_B: torch.Tensor,
    depth_B: torch.Tensor,
    branching_B: torch.Tensor,
    max_nodes: int,
) -> TreeBatch:
    """Answer `ddtree_bench.kernels.build_tree.build_tree`."""
    budgets = node_budget_B.tolist()
    if budgets and max(budgets) + 1 > max_nodes:
        raise ValueError(f"node_budget_B must be at most max_nodes - 1 = {max_nodes - 1}, got {max(budgets)}; raise max_nodes")
    columns = zip(
        topk_logprobs_BDK.cpu().numpy(),
        topk_tokens_BDK.cpu().numpy(),
        root_tokens_B.tolist(),
        budgets,
        depth_B.tolist(),
        branching_B.tolist(),
        strict=True,
    )
    trees = [
        build_ddtree_tree_from_topk(
            logprobs_DK, tokens_DK, node_budget=node_budget, depth=depth, branching=branching, root_token=root_token
        )
        for logprobs_DK, tokens_DK, root_token, node_budget, depth, branching in columns
    ]
    return _pack(trees, max_nodes, topk_logprobs_BDK.device)


def build_chain_batch(
    topk_logprobs_BDK: torch.Tensor,
    topk_tokens_BDK: torch.Tensor,
    root_tokens_B: torch.Tensor,
    *,
    depth_B: torch.Tensor,
    max_nodes: int,
) -> TreeBatch:
    """Answer `ddtree_bench.kernels.build_tree.build_chain_batch`."""
    longest = max((min(depth, topk_logprobs_BDK.shape[1]) for depth in depth_B.tolist()), default=0)
    if longest + 1 > max_nodes:
        raise ValueError(f"depth_B must be at most max_nodes - 1 = {max_nodes - 1}, got {longest}; raise max_nodes")
    columns = zip(
        topk_logprobs_BDK.cpu().numpy(),
        topk_tokens_BDK.cpu().numpy(),
        root_tokens_B.tolist(),
        depth_B.tolist(),
        strict=True,
    )
    chains = [
        build_chain(logprobs_DK, tokens_DK, depth=depth, root_token=root_token)
        for logprobs_DK, tokens_DK, root_token, depth in columns
    ]
    return _pack(chains, max_nodes, topk_logprobs_BDK.device)


def _pack(trees: Sequence[DraftTree], max_nodes: int, device: torch.device) -> TreeBatch:
    visibility_BNN = np.zeros((len(trees), max_nodes, max_nodes), dtype=bool)
    for tree, room_NN in zip(trees, visibility_BNN, strict=True):
        room_NN[: tree.num_nodes, : tree.num_nodes] = compile_ddtree_visibility(tree)[0]
    links = [sibling_links(tree) for tree in trees]

    def rows(arrays: list[np.ndarray], dtype: type, filler: int) -> torch.Tensor:
        packed_BN: np.ndarray = np.full((len(trees), max_nodes), filler, dtype=dtype)
        for room_N, array in zip(packed_BN, arrays, strict=True):
            room_N[: len(array)] = array
        return torch.from_numpy(packed_BN).to(device)

    return TreeBatch(
        tokens_BN=rows([tree.tokens_N for tree in trees], np.int64, 0),
        parents_BN=rows([tree.parents_N for tree in trees], np.int32, -1),
        depths_BN=rows([tree.depths_N for tree in trees], np.int32, 0),
        scores_BN=rows([tree.scores_N for tree in trees], np.float32, 0),
        num_nodes_B=torch.tensor([tree.num_nodes for tree in trees], dtype=torch.int32, device=device),
        visibility_BNN=torch.from_numpy(visibility_BNN).to(device),
        first_child_BN=rows([link.first_child_N for link in links], np.int32, -1),
        next_sibling_BN=rows([link.next_sibling_N for link in links], np.int32, -1),
    )
