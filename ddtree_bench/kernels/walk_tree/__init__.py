"""Walk verified trees of a batch: which nodes the target accepts, and its own token after them.

The meaning is that of `ddtree_bench.tree.follow_verified_tree`. Choosing the target's tokens (argmax or sample) comes
before, cutting at stop tokens and lengths comes after.

Letters: B sequences, N room for nodes of a tree.
"""

import torch

from ddtree_bench.kernels.checks import INTEGERS, check_same_device, check_tensor
from ddtree_bench.kernels.walk_tree import reference
from ddtree_bench.kernels.walk_tree.walk_batch import WalkBatch

__all__ = ["WalkBatch", "walk_tree"]


def walk_tree(
    tokens_BN: torch.Tensor, parents_BN: torch.Tensor, num_nodes_B: torch.Tensor, target_tokens_BN: torch.Tensor
) -> WalkBatch:
    """Follow the target's choices down each tree until no child matches.

    Args:
        tokens_BN: int64, tokens of the nodes; columns from num_nodes on are not read as nodes.
        parents_BN: int32, −1 for the root, which is node 0; parents come before children.
        num_nodes_B: integers of at least 1, root included.
        target_tokens_BN: int64, the target's choice of the token after each node.

    Returns:
        The walks, in new memory.

    Raises:
        TypeError, ValueError: an argument breaks the above.
    """
    check_tensor("tokens_BN", tokens_BN, (None, None), torch.int64)
    check_tensor("parents_BN", parents_BN, tuple(tokens_BN.shape), torch.int32)
    check_tensor("num_nodes_B", num_nodes_B, (tokens_BN.shape[0],), INTEGERS)
    check_tensor("target_tokens_BN", target_tokens_BN, tuple(tokens_BN.shape), torch.int64)
    check_same_device(tokens_BN=tokens_BN, parents_BN=parents_BN, num_nodes_B=num_nodes_B, target_tokens_BN=target_tokens_BN)
    if tokens_BN.shape[1] == 0:
        raise ValueError(f"tokens_BN must have room for the root, got shape {tuple(tokens_BN.shape)}; pass N of at least 1")
    if tokens_BN.is_cuda:
        from ddtree_bench.kernels.walk_tree import triton_kernel

        return triton_kernel.walk_tree(tokens_BN, parents_BN, num_nodes_B, target_tokens_BN)
    return reference.walk_tree(tokens_BN, parents_BN, num_nodes_B, target_tokens_BN)
