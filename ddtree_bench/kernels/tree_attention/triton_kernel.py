"""Triton implementation of `tree_attention`: the window's keys are read from the pages, under the mask or causally.

Letters: B sequences, T packed tokens, N widest window, H query heads, G key/value heads, E head size,
P pages of a cache (in the page table: pages of a sequence), S slots of a page.
"""

import torch

from ddtree_bench.kernels.paged_triton import AttentionConfig, attend_paged


def tree_attention(
    q_THE: torch.Tensor,
    k_cache_PSGE: torch.Tensor,
    v_cache_PSGE: torch.Tensor,
    page_table_BP: torch.Tensor,
    prefix_lengths_B: torch.Tensor,
    query_starts_B1: torch.Tensor,
    visibility_BNN: torch.Tensor | None,
    *,
    scale: float,
    config: AttentionConfig | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Answer `ddtree_bench.kernels.tree_attention.tree_attention`.

    Values on the device are not checked: a window wider than visibility_BNN, or a page table that is too narrow, gives
    undefined rows, never a read outside the arguments. For `config` and `num_splits` see `attend_paged`.
    """
    return attend_paged(
        q_THE,
        k_cache_PSGE,
        v_cache_PSGE,
        page_table_BP,
        prefix_lengths_B,
        query_starts_B1,
        scale=scale,
        visibility_BNN=visibility_BNN,
        config=config,
        num_splits=num_splits,
    )
