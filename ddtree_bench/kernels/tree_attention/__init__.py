"""Attention of packed queries over a paged prefix and over their own window under a visibility mask.

One contract serves plain decoding (one query a sequence), chains, trees and chunked prefill, also mixed in one batch.
The keys and values of the window itself have been written before (`write_kv`): node i of a sequence lies at logical
slot prefix_length + i, whatever its depth. Rotary positions are applied before.

The result of a sequence does not depend on which other sequences are in the batch.

Letters: B sequences, T packed tokens, N widest window, H query heads, G key/value heads, E head size,
P pages of a cache (in the page table: pages of a sequence), S slots of a page.
"""

import torch

from ddtree_bench.kernels.checks import FLOATS, INTEGERS, check_same_device, check_tensor
from ddtree_bench.kernels.tree_attention import reference

__all__ = ["tree_attention"]


def tree_attention(
    q_THE: torch.Tensor,
    k_cache_PSGE: torch.Tensor,
    v_cache_PSGE: torch.Tensor,
    page_table_BP: torch.Tensor,
    prefix_lengths_B: torch.Tensor,
    query_starts_B1: torch.Tensor,
    visibility_BNN: torch.Tensor | None = None,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute attention of every query over its prefix and the part of its window that it may see.

        out_i = Σ_j softmax_j(scale · q_i · k_j) v_j,  j over all prefix slots and the window slots visible to i

    Args:
        q_THE: float queries; rows query_starts[b] to query_starts[b + 1] belong to sequence b. H is a multiple of G,
            and query head h reads key/value head h // (H / G).
        k_cache_PSGE: keys, of the queries' dtype.
        v_cache_PSGE: values, likewise.
        page_table_BP: int32; logical slot p of sequence b is slot p % S of page page_table[b, p // S].
        prefix_lengths_B: integers of at least 0, slots that every query of the sequence sees.
        query_starts_B1: integers, B + 1 of them, ascending from 0. A sequence may have no queries.
        visibility_BNN: bool, row and column i for node i of the window; what lies beyond a window is not read,
            and a slot that no query sees may hold anything (fillers ride along this way).
            None for causal: node i sees the nodes up to i.
        scale: factor of the scores.

    Returns:
        out_THE: of the queries' dtype, in new memory. Rows from query_starts[B] on are 0, as are queries that see nothing.

    Raises:
        TypeError, ValueError: an argument breaks the above.
    """
    check_tensor("q_THE", q_THE, (None, None, None), FLOATS)
    num_heads, head_size = q_THE.shape[1:]
    check_tensor("k_cache_PSGE", k_cache_PSGE, (None, None, None, head_size), q_THE.dtype)
    check_tensor("v_cache_PSGE", v_cache_PSGE, tuple(k_cache_PSGE.shape), q_THE.dtype)
    num_kv_heads = k_cache_PSGE.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q_THE must have a multiple of the cache's {num_kv_heads} heads, got {num_heads}; shard both alike")
    check_tensor("page_table_BP", page_table_BP, (None, None), torch.int32)
    batch_size = page_table_BP.shape[0]
    check_tensor("prefix_lengths_B", prefix_lengths_B, (batch_size,), INTEGERS)
    check_tensor("query_starts_B1", query_starts_B1, (batch_size + 1,), INTEGERS)
    if visibility_BNN is not None:
        check_tensor("visibility_BNN", visibility_BNN, (batch_size, None, None), torch.bool)
        check_tensor("visibility_BNN", visibility_BNN, (batch_size, *visibility_BNN.shape[2:] * 2), torch.bool)
    check_same_device(
        q_THE=q_THE,
        k_cache_PSGE=k_cache_PSGE,
        v_cache_PSGE=v_cache_PSGE,
        page_table_BP=page_table_BP,
        prefix_lengths_B=prefix_lengths_B,
        query_starts_B1=query_starts_B1,
        visibility_BNN=visibility_BNN,
    )
    arguments = (
        q_THE,
        k_cache_PSGE,
        v_cache_PSGE,
        page_table_BP,
        prefix_lengths_B,
        query_starts_B1,
        visibility_BNN,
    )
    if not q_THE.is_cuda or q_THE.dtype == torch.float64:
        # float64 is for oracles: the kernel accumulates in float32.
        return reference.tree_attention(*arguments, scale=scale)
    from ddtree_bench.kernels.tree_attention import triton_kernel

    return triton_kernel.tree_attention(*arguments, scale=scale)
