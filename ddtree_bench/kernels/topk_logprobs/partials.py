"""What one vocabulary shard knows about the top-k of a row.

Letters: R rows, K candidates.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class TopkPartials:
    """Hold one shard's candidates, best first, and its share of the softmax's denominator.

    Args:
        logits_RK: float32 raw logits, before temperature; −inf where there is no candidate.
        tokens_RK: int64 global token ids; −1 where there is no candidate.
        lse_R: float32 log-sum-exp of logits / temperature over the shard; −inf where it has no finite logit.
    """

    logits_RK: torch.Tensor
    tokens_RK: torch.Tensor
    lse_R: torch.Tensor
