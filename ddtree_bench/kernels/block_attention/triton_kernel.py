"""Triton implementation of `block_attention`: the block's keys are read from tensors of their own, without a mask.

Letters: B sequences, T packed tokens, H query heads, G key/value heads, E head size,
P pages of a cache (in the page table: pages of a sequence), S slots of a page.
"""

import torch

from ddtree_bench.kernels.paged_triton import AttentionConfig, attend_paged


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
    config: AttentionConfig | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Answer `ddtree_bench.kernels.block_attention.block_attention`.

    Values on the device are not checked: a page table that is too narrow gives undefined rows, never a read outside the
    arguments. For `config` and `num_splits` see `attend_paged`.
    """
    return attend_paged(
        q_THE,
        k_cache_PSGE,
        v_cache_PSGE,
        page_table_BP,
        context_lengths_B,
        query_starts_B1,
        scale=scale,
        own_k_TGE=k_TGE,
        own_v_TGE=v_TGE,
        config=config,
        num_splits=num_splits,
    )
