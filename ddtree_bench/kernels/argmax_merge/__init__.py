"""Argmax over a vocabulary sharded over ranks: a local choice, then a merge of the gathered choices.

Ties go to the lowest global token id. NaN and −inf are never chosen; a row without a finite score yields
(−inf, token −1), which no token equals, so that the caller can stop instead of emitting it.

Letters: R rows, V vocabulary ids of this shard, W ranks.
"""

import torch

from ddtree_bench.kernels.argmax_merge import reference
from ddtree_bench.kernels.checks import FLOATS, check_count, check_same_device, check_tensor

__all__ = ["local_argmax", "merge_argmax"]


def local_argmax(scores_RV: torch.Tensor, vocab_offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best token of one vocabulary shard.

    Args:
        scores_RV: floats; local column v is global token vocab_offset + v.
        vocab_offset: global id of the shard's first column.

    Returns:
        value_R: float32, the best score.
        token_R: int64, its global token id.

    Raises:
        TypeError, ValueError: an argument breaks the above.
    """
    check_tensor("scores_RV", scores_RV, (None, None), FLOATS)
    check_count("vocab_offset", vocab_offset, at_least=0)
    if scores_RV.shape[1] == 0:
        raise ValueError(f"scores_RV must have at least one column, got shape {tuple(scores_RV.shape)}; give each rank ids")
    if scores_RV.is_cuda:
        from ddtree_bench.kernels.argmax_merge import triton_kernel

        return triton_kernel.local_argmax(scores_RV, vocab_offset)
    return reference.local_argmax(scores_RV, vocab_offset)


def merge_argmax(value_WR: torch.Tensor, token_WR: torch.Tensor) -> torch.Tensor:
    """Choose among the ranks' choices.

    Args:
        value_WR: float32, the ranks' best scores, in any order of ranks.
        token_WR: int64, their global token ids.

    Returns:
        token_R: int64.

    Raises:
        TypeError, ValueError: an argument breaks the above.
    """
    check_tensor("value_WR", value_WR, (None, None), torch.float32)
    check_tensor("token_WR", token_WR, tuple(value_WR.shape), torch.int64)
    check_same_device(value_WR=value_WR, token_WR=token_WR)
    if value_WR.is_cuda:
        from ddtree_bench.kernels.argmax_merge import triton_kernel

        return triton_kernel.merge_argmax(value_WR, token_WR)
    return reference.merge_argmax(value_WR, token_WR)
