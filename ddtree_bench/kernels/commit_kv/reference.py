"""Reference of `commit_kv` in torch.

Letters: L layers, M rows to move, P pages of a cache, S slots of a page, G key/value heads, E head size.
"""

from collections.abc import Sequence

import torch


def commit_kv(
    k_caches_LPSGE: Sequence[torch.Tensor] | torch.Tensor,
    v_caches_LPSGE: Sequence[torch.Tensor] | torch.Tensor,
    source_slots_M: torch.Tensor,
    destination_slots_M: torch.Tensor,
) -> None:
    """Answer `ddtree_bench.kernels.commit_kv.commit_kv`."""
    is_moved_M = (source_slots_M >= 0) & (destination_slots_M >= 0) & (source_slots_M != destination_slots_M)
    sources_M, destinations_M = source_slots_M[is_moved_M], destination_slots_M[is_moved_M]
    if not len(sources_M):
        return
    for cache_PSGE in (*k_caches_LPSGE, *v_caches_LPSGE):
        num_pages, page_size = cache_PSGE.shape[:2]
        last = max(int(sources_M.max()), int(destinations_M.max()))
        if last >= num_pages * page_size:
            raise ValueError(f"slots must be below {num_pages} pages x {page_size} slots, got {last}; pass slots of this cache")
        rows_MGE = cache_PSGE[sources_M // page_size, sources_M % page_size]  # indexing copies, so overlap is safe
        cache_PSGE[destinations_M // page_size, destinations_M % page_size] = rows_MGE
