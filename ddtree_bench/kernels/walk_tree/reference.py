"""Reference of `walk_tree` in torch: all sequences take one step at a time.

Letters: B sequences, N room for nodes of a tree.
"""

import torch

from ddtree_bench.kernels.walk_tree.walk_batch import WalkBatch


def walk_tree(
    tokens_BN: torch.Tensor, parents_BN: torch.Tensor, num_nodes_B: torch.Tensor, target_tokens_BN: torch.Tensor
) -> WalkBatch:
    """Answer `ddtree_bench.kernels.walk_tree.walk_tree`."""
    batch_size, num_columns = tokens_BN.shape
    nodes_N = torch.arange(num_columns, device=tokens_BN.device)
    is_draft_BN = (nodes_N > 0) & (nodes_N < num_nodes_B[:, None])
    # Column 0 has no parent; clamping keeps the gather inside the row, and is_draft_BN drops what it finds.
    choices_BN = target_tokens_BN.gather(1, parents_BN.long().clamp(0, num_columns - 1))
    is_matched_BN = is_draft_BN & (tokens_BN == choices_BN)

    path_BN = torch.full_like(parents_BN, -1)
    path_BN[:, 0] = 0
    current_B = torch.zeros(batch_size, dtype=torch.int64, device=tokens_BN.device)
    is_walking_B = torch.ones(batch_size, dtype=torch.bool, device=tokens_BN.device)
    for depth in range(1, num_columns):
        is_next_BN = is_matched_BN & (parents_BN == current_B[:, None]) & is_walking_B[:, None]
        next_B = torch.where(is_next_BN, nodes_N, num_columns).amin(1)
        is_walking_B = next_B < num_columns
        if not is_walking_B.any():
            break
        current_B = torch.where(is_walking_B, next_B, current_B)
        path_BN[:, depth] = torch.where(is_walking_B, next_B, -1).int()
    return WalkBatch(
        path_BN=path_BN,
        num_accepted_B=((path_BN >= 0).sum(1) - 1).int(),
        bonus_tokens_B=target_tokens_BN.gather(1, current_B[:, None]).squeeze(1),
    )
