"""Reference of `write_kv` in torch.

Letters: T packed tokens, G key/value heads, E head size, P pages of a cache, S slots of a page.
"""

import torch


def write_kv(
    k_TGE: torch.Tensor, v_TGE: torch.Tensor, k_cache_PSGE: torch.Tensor, v_cache_PSGE: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """Answer `ddtree_bench.kernels.write_kv.write_kv`."""
    num_pages, page_size = k_cache_PSGE.shape[:2]
    if len(slots_T) and int(slots_T.max()) >= num_pages * page_size:
        raise ValueError(
            f"slots_T must be below {num_pages} pages x {page_size} slots, got {int(slots_T.max())}; allocate more pages"
        )
    is_written_T = slots_T >= 0
    if not is_written_T.all():
        k_TGE, v_TGE, slots_T = k_TGE[is_written_T], v_TGE[is_written_T], slots_T[is_written_T]
    place = (slots_T // page_size, slots_T % page_size)
    k_cache_PSGE[place] = k_TGE
    v_cache_PSGE[place] = v_TGE
