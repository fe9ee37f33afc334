"""Reference of `tree_attention` in torch: one sequence after the other.

Letters: B sequences, T packed tokens, N window (widest of the batch, or of one sequence), H query heads,
G key/value heads, E head size, C keys of a sequence, P pages, S slots of a page.
"""

import torch

from ddtree_bench.kernels.paged import attend, gather_pages


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
) -> torch.Tensor:
    """Answer `ddtree_bench.kernels.tree_attention.tree_attention`."""
    out_THE = torch.zeros_like(q_THE)
    starts = query_starts_B1.tolist()
    for row, prefix_length in enumerate(prefix_lengths_B.tolist()):
        start, end = starts[row : row + 2]
        num_queries = end - start
        if num_queries == 0:
            continue
        num_keys = prefix_length + num_queries
        out_THE[start:end] = attend(
            q_THE[start:end],
            gather_pages(k_cache_PSGE, page_table_BP[row], num_keys),
            gather_pages(v_cache_PSGE, page_table_BP[row], num_keys),
            _visibility(visibility_BNN, row, num_queries, num_keys, q_THE.device),
            scale=scale,
        )
    return out_THE


def _visibility(
    visibility_BNN: torch.Tensor | None, row: int, num_queries: int, num_keys: int, device: torch.device
) -> torch.Tensor | None:
    """Widen one sequence's window mask by its prefix."""
    if visibility_BNN is None and num_queries == 1:
        return None
    visibility_NC = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if visibility_BNN is None:
        return visibility_NC.tril(num_keys - num_queries)
    if num_queries > visibility_BNN.shape[1]:
        raise ValueError(
            f"visibility_BNN must cover the {num_queries} queries of sequence {row}, got {visibility_BNN.shape[1]} rows; "
            "widen it or pass None for causal"
        )
    visibility_NC[:, num_keys - num_queries :] = visibility_BNN[row, :num_queries, :num_queries]
    return visibility_NC
