"""Make accepted paths part of their prefixes: move rows of the caches of all layers.

After a walk the rows of an accepted path lie scattered in the window; commit moves them to the slots right after the
prefix. Sources and destinations may overlap in any way.

Letters: L layers, M rows to move, P pages of a cache, S slots of a page, G key/value heads, E head size.
"""

from collections.abc import Sequence

import torch

from ddtree_bench.kernels.checks import FLOATS, check_same_device, check_tensor
from ddtree_bench.kernels.commit_kv import reference

__all__ = ["commit_kv"]


def commit_kv(
    k_caches_LPSGE: Sequence[torch.Tensor] | torch.Tensor,
    v_caches_LPSGE: Sequence[torch.Tensor] | torch.Tensor,
    source_slots_M: torch.Tensor,
    destination_slots_M: torch.Tensor,
) -> None:
    """Copy slot source_slots_M[m] to slot destination_slots_M[m] in every layer, as if all were read before any is written.

    Args:
        k_caches_LPSGE: the layers' key caches, a sequence of [P, S, G, E] or one stacked tensor; written in place.
        v_caches_LPSGE: the layers' value caches, likewise.
        source_slots_M: int64, page × S + offset.
        destination_slots_M: int64, each at most once. A pair in which either slot is negative is skipped.

    Raises:
        TypeError, ValueError: an argument breaks the above; a slot beyond the cache is seen by the reference only.
    """
    if len(k_caches_LPSGE) != len(v_caches_LPSGE):
        raise ValueError(
            f"k_caches_LPSGE and v_caches_LPSGE must have one cache a layer, got {len(k_caches_LPSGE)} and "
            f"{len(v_caches_LPSGE)}; pass all layers of both"
        )
    check_tensor("source_slots_M", source_slots_M, (None,), torch.int64)
    check_tensor("destination_slots_M", destination_slots_M, tuple(source_slots_M.shape), torch.int64)
    check_same_device(source_slots_M=source_slots_M, destination_slots_M=destination_slots_M)
    for layer, (k_cache_PSGE, v_cache_PSGE) in enumerate(zip(k_caches_LPSGE, v_caches_LPSGE, strict=True)):
        check_tensor(f"k_caches_LPSGE[{layer}]", k_cache_PSGE, tuple(k_caches_LPSGE[0].shape), FLOATS)
        check_tensor(f"v_caches_LPSGE[{layer}]", v_cache_PSGE, tuple(k_cache_PSGE.shape), k_cache_PSGE.dtype)
        check_same_device(source_slots_M=source_slots_M, k_cache=k_cache_PSGE, v_cache=v_cache_PSGE)
    if source_slots_M.is_cuda:
        from ddtree_bench.kernels.commit_kv import triton_kernel

        triton_kernel.commit_kv(k_caches_LPSGE, v_caches_LPSGE, source_slots_M, destination_slots_M)
        return
    reference.commit_kv(k_caches_LPSGE, v_caches_LPSGE, source_slots_M, destination_slots_M)
