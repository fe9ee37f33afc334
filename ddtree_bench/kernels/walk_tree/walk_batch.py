"""The walks of a batch in one set of tensors.

Letters: B sequences, N room for nodes of a tree.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class WalkBatch:
    """Hold one accepted path a row.

    Args:
        path_BN: int32, node indices from the root (0) to the last accepted node, then −1.
        num_accepted_B: int32, draft tokens accepted; the path holds num_accepted + 1 nodes.
        bonus_tokens_B: int64, the target's choice at the last accepted node.
    """

    path_BN: torch.Tensor
    num_accepted_B: torch.Tensor
    bonus_tokens_B: torch.Tensor
