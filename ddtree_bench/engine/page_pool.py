"""Pages of the cache as numbers: which are free and how many a sequence needs. The tensors are in `kv_caches`.

Every rank runs the same calls in the same order, so every rank hands out the same pages.
"""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """A free list of equal pages.

    Args:
        num_pages: pages of the pool.
        page_size: token slots of a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` slots."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Return pages that now belong to the caller; the caller has checked `num_free`."""
        assert num_pages <= self.num_free, f"allocate needs {num_pages} pages and {self.num_free} are free"
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Take pages back."""
        for page in reversed(pages):
            assert not self._is_free[page], f"page {page} is released twice"
            self._is_free[page] = True
            self._free.append(page)
