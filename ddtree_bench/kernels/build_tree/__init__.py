"""Draft trees of a batch: which nodes, and what each may see.

The meaning is that of `ddtree_bench.tree`; the batch adds a leading axis, device-side lengths and room for
`max_nodes`. Given one float32 table every implementation and device builds the same tree. On a GPU a tree may have
1,025 nodes, 31 depths and 64 candidates a depth at most.

Letters: B sequences, D draft depths, K candidates of a depth, N = max_nodes.
"""

from collections.abc import Callable

import torch

from ddtree_bench.kernels.build_tree import reference
from ddtree_bench.kernels.build_tree.tree_batch import TreeBatch
from ddtree_bench.kernels.checks import INTEGERS, check_count, check_same_device, check_tensor

__all__ = ["TreeBatch", "build_chain_batch", "build_tree"]


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
    """Build the tree of the best prefixes of each sequence, with caps of its own.

    Args:
        topk_logprobs_BDK: float32, at most 0 and not increasing along K; NaN and −inf are never selected.
        topk_tokens_BDK: int64 token ids, different along K where selectable.
        root_tokens_B: int64.
        node_budget_B: integers of at least 0, most draft nodes; node_budget + 1 is at most max_nodes.
        depth_B: integers of at least 0, most edges below the root; D or more is no cap.
        branching_B: integers of at least 1, most children of a node below the root; K or more is no cap.
        max_nodes: N, the room for each tree, root included.

    Returns:
        The trees, in new memory.

    Raises:
        TypeError, ValueError: an argument breaks the above. Values are checked by the reference only; on a GPU caps
            are lowered to the room there is.
    """
    _check_table(topk_logprobs_BDK, topk_tokens_BDK, root_tokens_B, max_nodes)
    caps = {"node_budget_B": node_budget_B, "depth_B": depth_B, "branching_B": branching_B}
    for name, cap_B in caps.items():
        check_tensor(name, cap_B, (topk_logprobs_BDK.shape[0],), INTEGERS)
    check_same_device(topk_logprobs_BDK=topk_logprobs_BDK, **caps)
    build: Callable[..., TreeBatch] = reference.build_tree
    if topk_logprobs_BDK.is_cuda:
        from ddtree_bench.kernels.build_tree import triton_kernel

        build = triton_kernel.build_tree
    return build(topk_logprobs_BDK, topk_tokens_BDK, root_tokens_B, **caps, max_nodes=max_nodes)


def build_chain_batch(
    topk_logprobs_BDK: torch.Tensor,
    topk_tokens_BDK: torch.Tensor,
    root_tokens_B: torch.Tensor,
    *,
    depth_B: torch.Tensor,
    max_nodes: int,
) -> TreeBatch:
    """Build the chain of the best candidate of each depth, in the form of `build_tree`.

    Args: as for `build_tree`; min(depth, D) + 1 is at most max_nodes.

    Returns: as `build_tree`.

    Raises: as `build_tree`.
    """
    _check_table(topk_logprobs_BDK, topk_tokens_BDK, root_tokens_B, max_nodes)
    check_tensor("depth_B", depth_B, (topk_logprobs_BDK.shape[0],), INTEGERS)
    check_same_device(topk_logprobs_BDK=topk_logprobs_BDK, depth_B=depth_B)
    build: Callable[..., TreeBatch] = reference.build_chain_batch
    if topk_logprobs_BDK.is_cuda:
        from ddtree_bench.kernels.build_tree import triton_kernel

        build = triton_kernel.build_chain_batch
    return build(topk_logprobs_BDK, topk_tokens_BDK, root_tokens_B, depth_B=depth_B, max_nodes=max_nodes)


def _check_table(logprobs_BDK: torch.Tensor, tokens_BDK: torch.Tensor, root_tokens_B: torch.Tensor, max_nodes: int) -> None:
    check_tensor("topk_logprobs_BDK", logprobs_BDK, (None, None, None), torch.float32)
    check_tensor("topk_tokens_BDK", tokens_BDK, tuple(logprobs_BDK.shape), torch.int64)
    check_tensor("root_tokens_B", root_tokens_B, (logprobs_BDK.shape[0],), torch.int64)
    check_same_device(topk_logprobs_BDK=logprobs_BDK, topk_tokens_BDK=tokens_BDK, root_tokens_B=root_tokens_B)
    check_count("max_nodes", max_nodes, at_least=1)
