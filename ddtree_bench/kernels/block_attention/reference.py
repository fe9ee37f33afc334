"""Reference of `block_attention` in torch: one sequence after the other.

Letters: B sequences, T packed tokens, H query heads, G key/value heads, E head size, C keys of a sequence,
P pages, S slots of a page.
"""

import torch

from ddtree_bench.kernels.paged import attend, gather_pages


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
    """Answer `ddtree_bench.kernels.block_attention.block_attention`."""
    out_THE = torch.zeros_like(q_THE)
    starts = query_starts_B1.tolist()
    for row, context_length in enumerate(context_lengths_B.tolist()):
        start, end = starts[row : row + 2]
        if start == end:
            continue
        k_CGE = torch.cat([gather_pages(k_cache_PSGE, page_table_BP[row], context_length), k_TGE[start:end]])
        v_CGE = torch.cat([gather_pages(v_cache_PSGE, page_table_BP[row], context_length), v_TGE[start:end]])
        out_THE[start:end] = attend(q_THE[start:end], k_CGE, v_CGE, None, scale=scale)
    return out_THE
