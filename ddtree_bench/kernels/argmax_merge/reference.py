"""Reference of `argmax_merge` in torch.

Letters: R rows, V vocabulary ids of this shard, W ranks.
"""

import torch

_BEYOND_ANY_TOKEN = 2**62


def local_argmax(scores_RV: torch.Tensor, vocab_offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer `ddtree_bench.kernels.argmax_merge.local_argmax`."""
    finite_RV = _nan_to_minus_infinity(scores_RV.float())
    column_R1 = finite_RV.argmax(1, keepdim=True)  # the first of equals, as torch documents
    value_R = finite_RV.gather(1, column_R1).squeeze(1)
    return value_R, torch.where(value_R == -torch.inf, -1, column_R1.squeeze(1) + vocab_offset)


def merge_argmax(value_WR: torch.Tensor, token_WR: torch.Tensor) -> torch.Tensor:
    """Answer `ddtree_bench.kernels.argmax_merge.merge_argmax`."""
    finite_WR = _nan_to_minus_infinity(value_WR)
    best_R = finite_WR.amax(0)
    lowest_R = torch.where(finite_WR == best_R, token_WR, _BEYOND_ANY_TOKEN).amin(0)
    return torch.where(best_R == -torch.inf, -1, lowest_R)


def _nan_to_minus_infinity(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
