"""Top-k log-probabilities of drafter logits, whole or sharded over the vocabulary.

Under tensor parallelism each rank calls `topk_partials` on its shard, the partials are gathered in rank order, and
every rank calls `merge_topk_partials` on the same tensors, so that all ranks hold the same table. Full logits are
never gathered. Gathering itself is left to the caller.

Candidates are ordered by raw logit, then by lower global token id. A logit that is NaN or −inf (a padded id) is
never selected: it counts as probability 0, and a place that no candidate fills holds (−inf, token −1).

Letters: R rows, V vocabulary ids of this shard, K candidates, W ranks.
"""

import torch

from ddtree_bench.kernels.checks import FLOATS, check_count, check_same_device, check_temperature, check_tensor
from ddtree_bench.kernels.topk_logprobs import reference
from ddtree_bench.kernels.topk_logprobs.partials import TopkPartials

__all__ = ["TopkPartials", "merge_topk_partials", "topk_logprobs", "topk_partials"]


def topk_partials(logits_RV: torch.Tensor, k: int, *, vocab_offset: int, temperature: float = 1.0) -> TopkPartials:
    """Select the candidates of one vocabulary shard and sum up the rest.

        lse_r = log Σ_v exp(logit_rv / temperature)

    Args:
        logits_RV: float logits; local column v is global token vocab_offset + v.
        k: candidates a row; may exceed V.
        vocab_offset: global id of the shard's first column.
        temperature: divides the logits in lse_R; order and returned logits are those before it.

    Returns:
        The partials, K = k.

    Raises:
        TypeError, ValueError: an argument breaks the above.
    """
    check_tensor("logits_RV", logits_RV, (None, None), FLOATS)
    check_count("k", k, at_least=1)
    check_count("vocab_offset", vocab_offset, at_least=0)
    check_temperature(temperature)
    if logits_RV.shape[1] == 0:
        raise ValueError(f"logits_RV must have at least one column, got shape {tuple(logits_RV.shape)}; give each rank ids")
    if logits_RV.is_cuda:
        from ddtree_bench.kernels.topk_logprobs import triton_kernel

        return triton_kernel.topk_partials(logits_RV, k, vocab_offset=vocab_offset, temperature=temperature)
    return reference.topk_partials(logits_RV, k, vocab_offset=vocab_offset, temperature=temperature)


def merge_topk_partials(
    logits_WRK: torch.Tensor, tokens_WRK: torch.Tensor, lse_WR: torch.Tensor, k: int, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the partials of all shards, in rank order, into one table.

        logprob = logit / temperature − log Σ_w exp(lse_w)

    Args:
        logits_WRK: float32 raw logits of the ranks' candidates.
        tokens_WRK: int64 global token ids.
        lse_WR: float32.
        k: candidates to keep a row, at most W × K.
        temperature: the one that the partials were made with.

    Returns:
        logprobs_RK: float32, at most 0, not increasing along a row.
        tokens_RK: int64 global token ids.

    Raises:
        TypeError, ValueError: an argument breaks the above.
    """
    check_tensor("logits_WRK", logits_WRK, (None, None, None), torch.float32)
    check_tensor("tokens_WRK", tokens_WRK, tuple(logits_WRK.shape), torch.int64)
    check_tensor("lse_WR", lse_WR, tuple(logits_WRK.shape[:2]), torch.float32)
    check_same_device(logits_WRK=logits_WRK, tokens_WRK=tokens_WRK, lse_WR=lse_WR)
    check_count("k", k, at_least=1)
    check_temperature(temperature)
    num_candidates = logits_WRK.shape[0] * logits_WRK.shape[2]
    if k > num_candidates:
        raise ValueError(f"k must be at most the {num_candidates} gathered candidates, got {k}; make partials with a larger k")
    if logits_WRK.is_cuda:
        from ddtree_bench.kernels.topk_logprobs import triton_kernel

        return triton_kernel.merge_topk_partials(logits_WRK, tokens_WRK, lse_WR, k, temperature=temperature)
    return reference.merge_topk_partials(logits_WRK, tokens_WRK, lse_WR, k, temperature=temperature)


def topk_logprobs(logits_RV: torch.Tensor, k: int, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the top-k log-probabilities over a whole vocabulary: the partials of one rank, merged.

    Args and Returns: as for `topk_partials` and `merge_topk_partials`.
    """
    partials = topk_partials(logits_RV, k, vocab_offset=0, temperature=temperature)
    return merge_topk_partials(
        partials.logits_RK[None], partials.tokens_RK[None], partials.lse_R[None], k, temperature=temperature
    )
