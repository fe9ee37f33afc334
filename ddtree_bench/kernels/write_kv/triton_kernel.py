"""`write_kv` in Triton: one program writes one token's keys or values.

Letters: T packed tokens, G key/value heads, E head size, P pages of a cache, S slots of a page.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    page_size,
    row_size,
    stride_kt,
    stride_kg,
    stride_ke,
    stride_vt,
    stride_vg,
    stride_ve,
    stride_kcp,
    stride_kcs,
    stride_kcg,
    stride_kce,
    stride_vcp,
    stride_vcs,
    stride_vcg,
    stride_vce,
    HEAD_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.load(slots_ptr + token)
    mask_c = offs_c < tl.where(slot >= 0, row_size, 0)
    page = slot // page_size
    place = slot - page * page_size
    heads_c = (offs_c // HEAD_SIZE).to(tl.int64)
    columns_c = (offs_c % HEAD_SIZE).to(tl.int64)
    if tl.program_id(2) == 0:
        row_c = tl.load(k_ptr + token * stride_kt + heads_c * stride_kg + columns_c * stride_ke, mask=mask_c)
        to_c = page * stride_kcp + place * stride_kcs + heads_c * stride_kcg + columns_c * stride_kce
        tl.store(k_cache_ptr + to_c, row_c, mask=mask_c)
    else:
        row_c = tl.load(v_ptr + token * stride_vt + heads_c * stride_vg + columns_c * stride_ve, mask=mask_c)
        to_c = page * stride_vcp + place * stride_vcs + heads_c * stride_vcg + columns_c * stride_vce
        tl.store(v_cache_ptr + to_c, row_c, mask=mask_c)


def write_kv(
    k_TGE: torch.Tensor,
    v_TGE: torch.Tensor,
    k_cache_PSGE: torch.Tensor,
    v_cache_PSGE: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    max_block: int = 1024,
    num_warps: int = 4,
) -> None:
    """Answer `ddtree_bench.kernels.write_kv.write_kv`; a slot beyond the cache is the caller's fault and not checked.

    Args:
        max_block: most elements that a program copies.
        num_warps: warps of a program.
    """
    num_tokens, num_kv_heads, head_size = k_TGE.shape
    row_size = num_kv_heads * head_size
    if num_tokens * row_size == 0:
        return
    block = min(max_block, triton.next_power_of_2(row_size))
    _write_kernel[(num_tokens, triton.cdiv(row_size, block), 2)](
        k_TGE,
        v_TGE,
        k_cache_PSGE,
        v_cache_PSGE,
        slots_T.contiguous(),
        k_cache_PSGE.shape[1],
        row_size,
        *k_TGE.stride(),
        *v_TGE.stride(),
        *k_cache_PSGE.stride(),
        *v_cache_PSGE.stride(),
        HEAD_SIZE=head_size,
        BLOCK_C=block,
        num_warps=num_warps,
    )
