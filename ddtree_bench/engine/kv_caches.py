"""The cache tensors of target and drafter, and where a token's entry lies in them.

Both models' caches have the same pages and slots, so that one page table serves both. Which pages are free is left to
`page_pool`.

Letters: B sequences, L layers, P pages of a cache (in the page table: pages of a sequence), S slots of a page,
G key/value heads of this rank, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of one model's cache on this rank."""

    num_layers: int
    num_kv_heads: int
    head_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * dtype.itemsize


class KVCaches:
    """Keys and values of one model, uninitialised until written.

    Args:
        k_caches: one k_PSGE a layer; v_caches likewise.
    """

    def __init__(
        self, shape: CacheShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        sizes = (shape.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_size)
        self.k_caches = torch.empty(sizes, dtype=dtype, device=device).unbind(0)
        self.v_caches = torch.empty(sizes, dtype=dtype, device=device).unbind(0)


def page_table(pages_of: Sequence[Sequence[int]], device: torch.device | str) -> torch.Tensor:
    """Return page_table_BP, int32; places behind a sequence's pages hold 0 and are never read."""
    table_BP = np.zeros((len(pages_of), max(len(pages) for pages in pages_of)), dtype=np.int32)
    for row_P, pages in zip(table_BP, pages_of, strict=True):
        row_P[: len(pages)] = pages
    return torch.from_numpy(table_BP).to(device)


def slots_of(pages: Sequence[int], positions: np.ndarray, page_size: int) -> np.ndarray:
    """Return the slot of each logical position of one sequence, int64: page × S + offset."""
    return np.asarray(pages, dtype=np.int64)[positions // page_size] * page_size + positions % page_size
