"""The drafter's attention: the queries of a block see the cached context and the whole block.

The block's own keys and values are given as tensors and are not cached; there is no mask. Rotary positions are
applied before. The result of a sequence does not depend on which other sequences are in the batch.

Letters: B sequences, T packed tokens, H query heads, G key/value heads, E head size,
P pages of a cache (in the page table: pages of a sequence), S slots of a page.
"""

import torch

from ddtree_bench.kernels.block_attention import reference
from ddtree_bench.kernels.checks import FLOATS, INTEGERS, check_same_device, check_tensor

__all__ = ["block_attention"]


def block_attention(
    q_THE: torch.Tensor,
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    k_cache_PSGE: torch.Tensor,
    v_cache_PSGE: torch.Tensor,
    page_table_BP: torch.Tensor,
    context_lengths_B: torch.Tensor,
    query_starts_B1: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute attention of every query over its context and its own block.

        out_i = Σ_j softmax_j(scale · q_i · k_j) v_j,  j over all context slots and all rows of i's block

    Args:
        q_THE: float queries; rows query_starts[b] to query_starts[b + 1] are the block of sequence b. H is a multiple
            of G, and query head h reads key/value head h // (H / G).
        k_TGE: keys of the blocks, of the queries' dtype.
        v_TGE: values of the blocks, likewise.
        k_cache_PSGE: keys of the contexts, likewise.
        v_cache_PSGE: values of the contexts, likewise.
        page_table_BP: int32; logical slot p of sequence b is slot p % S of page page_table[b, p // S].
        context_lengths_B: integers of at least 0.
        query_starts_B1: integers, B + 1 of them, ascending from 0. A sequence may have no block.
        scale: factor of the scores.

    Returns:
        out_THE: of the queries' dtype, in new memory. Rows from query_starts[B] on are 0.

    Raises:
        TypeError, ValueError: an argument breaks the above.
    """
    check_tensor("q_THE", q_THE, (None, None, None), FLOATS)
    num_tokens, num_heads, head_size = q_THE.shape
    check_tensor("k_TGE", k_TGE, (num_tokens, None, head_size), q_THE.dtype)
    check_tensor("v_TGE", v_TGE, tuple(k_TGE.shape), q_THE.dtype)
    num_kv_heads = k_TGE.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q_THE must have a multiple of the {num_kv_heads} heads of k_TGE, got {num_heads}; shard both alike")
    check_tensor("k_cache_PSGE", k_cache_PSGE, (None, None, num_kv_heads, head_size), q_THE.dtype)
    check_tensor("v_cache_PSGE", v_cache_PSGE, tuple(k_cache_PSGE.shape), q_THE.dtype)
    check_tensor("page_table_BP", page_table_BP, (None, None), torch.int32)
    batch_size = page_table_BP.shape[0]
    check_tensor("context_lengths_B", context_lengths_B, (batch_size,), INTEGERS)
    check_tensor("query_starts_B1", query_starts_B1, (batch_size + 1,), INTEGERS)
    check_same_device(
        q_THE=q_THE,
        k_TGE=k_TGE,
        v_TGE=v_TGE,
        k_cache_PSGE=k_cache_PSGE,
        v_cache_PSGE=v_cache_PSGE,
        page_table_BP=page_table_BP,
        context_lengths_B=context_lengths_B,
        query_starts_B1=query_starts_B1,
    )
    arguments = (
        q_THE,
        k_TGE,
        v_TGE,
        k_cache_PSGE,
        v_cache_PSGE,
        page_table_BP,
        context_lengths_B,
        query_starts_B1,
    )
    if not q_THE.is_cuda or q_THE.dtype == torch.float64:
        # float64 is for oracles: the kernel accumulates in float32.
        return reference.block_attention(*arguments, scale=scale)
    from ddtree_bench.kernels.block_attention import triton_kernel

    return triton_kernel.block_attention(*arguments, scale=scale)
