"""What the references of the attention operations share: reading pages, and attention of one sequence.

Letters: P pages of a cache, S slots of a page, G key/value heads, E head size, H query heads, N queries,
C context keys, R query heads of a key/value head, M = R × N.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def gather_pages(cache_PSGE: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Copy the first `length` slots of one sequence out of its pages.

    Args:
        cache_PSGE: keys or values of all sequences.
        pages: integers [any], the sequence's pages in logical order.
        length: slots to read.

    Returns:
        rows_CGE: C = length, in new memory.

    Raises:
        ValueError: the pages hold fewer slots.
    """
    page_size = cache_PSGE.shape[1]
    num_pages = -(-length // page_size)
    if num_pages > len(pages):
        raise ValueError(
            f"page_table_BP must hold the {num_pages} pages of {length} slots of {page_size} each, got {len(pages)} columns; "
            "widen the table"
        )
    return cache_PSGE.index_select(0, pages[:num_pages]).flatten(0, 1)[:length]


def attend(
    q_NHE: torch.Tensor, k_CGE: torch.Tensor, v_CGE: torch.Tensor, visibility_NC: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """Compute attention of one sequence with grouped heads, in float32 or wider.

        out = softmax(scale · q kᵀ + mask) v

    Args:
        q_NHE: queries; query head h reads key/value head h // (H / G).
        k_CGE: keys.
        v_CGE: values.
        visibility_NC: bool, false where a query may not see a key; None for all. A query that sees nothing gets 0;
            a key that no query sees may hold anything.
        scale: factor of the scores.

    Returns:
        out_NHE: of the queries' dtype.
    """
    num_queries, num_heads, head_size = q_NHE.shape
    num_kv_heads = k_CGE.shape[1]
    group_size = num_heads // num_kv_heads
    wide = torch.promote_types(q_NHE.dtype, torch.float32)
    # The query heads of a group share keys, so they are laid out as more queries of one head.
    q_GME = q_NHE.unflatten(1, (num_kv_heads, group_size)).permute(1, 2, 0, 3).flatten(1, 2).to(wide)
    if visibility_NC is not None and not (is_seen_C := visibility_NC.any(0)).all():
        # A mask alone would let NaN through: 0 × NaN is NaN.
        k_CGE, v_CGE = (torch.where(is_seen_C[:, None, None], rows_CGE, 0.0) for rows_CGE in (k_CGE, v_CGE))
    k_GCE, v_GCE = k_CGE.transpose(0, 1).to(wide), v_CGE.transpose(0, 1).to(wide)
    mask_MC = None if visibility_NC is None else visibility_NC.repeat(group_size, 1)
    out_GME = scaled_dot_product_attention(q_GME[None], k_GCE[None], v_GCE[None], attn_mask=mask_MC, scale=scale)[0]
    out_NHE = out_GME.unflatten(1, (group_size, num_queries)).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_size)
    if visibility_NC is not None:
        out_NHE = torch.where(visibility_NC.any(1)[:, None, None], out_NHE, 0.0)
    return out_NHE.to(q_NHE.dtype)
