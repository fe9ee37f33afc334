"""Seeded paged caches for the cases of several operations.

Letters: B sequences, P pages of a cache (in a page table: pages of a sequence), S slots of a page,
G key/value heads, E head size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedCache:
    """Hold caches whose written slots are random and whose other slots are NaN.

    Pages of a sequence lie in no order; columns of the page table that a sequence does not use name page 0 of the
    cache, which belongs to nobody and is all NaN.
    """

    k_cache_PSGE: torch.Tensor
    v_cache_PSGE: torch.Tensor
    page_table_BP: torch.Tensor


def make_paged_cache(
    lengths: tuple[int, ...],
    *,
    page_size: int,
    num_kv_heads: int,
    head_size: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> PagedCache:
    """Write `lengths[b]` random slots of each sequence b into scattered pages."""
    num_pages = [-(-length // page_size) for length in lengths]
    shape = (sum(num_pages) + 1, page_size, num_kv_heads, head_size)
    k_cache_PSGE, v_cache_PSGE = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    free_pages = (torch.randperm(sum(num_pages), generator=generator) + 1).tolist()
    page_table_BP = torch.zeros(len(lengths), max([1, *num_pages]), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, num_pages, strict=True)):
        page_table_BP[row, :count] = torch.tensor([free_pages.pop() for _ in range(count)], dtype=torch.int32)
        for place in range(count):
            num_slots = min(page_size, length - place * page_size)
            page = page_table_BP[row, place]
            for cache_PSGE in (k_cache_PSGE, v_cache_PSGE):
                cache_PSGE[page, :num_slots] = torch.randn(num_slots, *shape[2:], generator=generator).to(dtype)
    return PagedCache(k_cache_PSGE=k_cache_PSGE, v_cache_PSGE=v_cache_PSGE, page_table_BP=page_table_BP)


def starts_of(counts: tuple[int, ...]) -> torch.Tensor:
    """Sum counts into int32 starts, one more than there are counts."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def check_attention_row(
    out_HE: torch.Tensor, q_HE: torch.Tensor, k_CGE: torch.Tensor, v_CGE: torch.Tensor, scale: float, *, where: str
) -> None:
    """Assert that one query's output errs at most twice as much as a plain computation in its dtype, plus a rounding step."""
    oracle_HE, plain_HE = (attend_plainly(q_HE, k_CGE, v_CGE, scale, dtype) for dtype in (torch.float64, out_HE.dtype))
    error = float((out_HE.double() - oracle_HE).abs().max())
    plain_error = float((plain_HE.double() - oracle_HE).abs().max())
    bound = 2 * plain_error + torch.finfo(out_HE.dtype).eps * float(oracle_HE.abs().max())
    assert error <= bound, f"{where} is off by {error}, more than {bound}"


def attend_plainly(
    q_HE: torch.Tensor, k_CGE: torch.Tensor, v_CGE: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Attend one query to the given keys in one dtype throughout."""
    q_GRE = q_HE.to(dtype).unflatten(0, (k_CGE.shape[1], -1))
    weights_GRC = (torch.einsum("gre,cge->grc", q_GRE, k_CGE.to(dtype)) * scale).softmax(-1)
    return torch.einsum("grc,cge->gre", weights_GRC, v_CGE.to(dtype)).flatten(0, 1)
