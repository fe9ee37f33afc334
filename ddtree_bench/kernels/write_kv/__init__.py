"""Write keys and values of packed tokens into the pages of a cache.

Letters: T packed tokens, G key/value heads, E head size, P pages of a cache, S slots of a page.
"""

import torch

from ddtree_bench.kernels.checks import FLOATS, check_same_device, check_tensor
from ddtree_bench.kernels.write_kv import reference

__all__ = ["write_kv"]


def write_kv(
    k_TGE: torch.Tensor, v_TGE: torch.Tensor, k_cache_PSGE: torch.Tensor, v_cache_PSGE: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """Write row t of the keys and values to slot slots_T[t].

    Args:
        k_TGE: float keys.
        v_TGE: float values of the same shape.
        k_cache_PSGE: owned by the caller, of the keys' dtype; written in place.
        v_cache_PSGE: likewise.
        slots_T: int64, page × S + offset, each at most once; a negative slot is skipped.

    Raises:
        TypeError, ValueError: an argument breaks the above; a slot beyond the cache is seen by the reference only.
    """
    check_tensor("k_TGE", k_TGE, (None, None, None), FLOATS)
    check_tensor("v_TGE", v_TGE, tuple(k_TGE.shape), k_TGE.dtype)
    check_tensor("k_cache_PSGE", k_cache_PSGE, (None, None, *k_TGE.shape[1:]), k_TGE.dtype)
    check_tensor("v_cache_PSGE", v_cache_PSGE, tuple(k_cache_PSGE.shape), k_TGE.dtype)
    check_tensor("slots_T", slots_T, (k_TGE.shape[0],), torch.int64)
    check_same_device(k_TGE=k_TGE, v_TGE=v_TGE, k_cache_PSGE=k_cache_PSGE, v_cache_PSGE=v_cache_PSGE, slots_T=slots_T)
    if k_TGE.is_cuda:
        from ddtree_bench.kernels.write_kv import triton_kernel

        triton_kernel.write_kv(k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T)
        return
    reference.write_kv(k_TGE, v_TGE, k_cache_PSGE, v_cache_PSGE, slots_T)
