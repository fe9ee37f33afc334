"""The draft trees of a batch in one set of tensors.

Letters: B sequences, N room for nodes of a tree.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeBatch:
    """Hold one tree a row, its nodes in best-first order with the root first.

    Beyond num_nodes_B a row holds token 0, parent −1, depth 0, score 0, links −1, and is false in visibility.
    Those values are fillers: only num_nodes_B says how long a tree is.

    Args:
        tokens_BN: int64; column 0 is the root's token.
        parents_BN: int32; −1 for the root.
        depths_BN: int32, 0 for the root; position = prefix length + depth.
        scores_BN: float32 summed log-probabilities; 0 for the root.
        num_nodes_B: int32, root included.
        visibility_BNN: bool, true where the column is the row's ancestor or the row itself.
        first_child_BN: int32, −1 where there is none.
        next_sibling_BN: int32, −1 where there is none.
    """

    tokens_BN: torch.Tensor
    parents_BN: torch.Tensor
    depths_BN: torch.Tensor
    scores_BN: torch.Tensor
    num_nodes_B: torch.Tensor
    visibility_BNN: torch.Tensor
    first_child_BN: torch.Tensor
    next_sibling_BN: torch.Tensor
