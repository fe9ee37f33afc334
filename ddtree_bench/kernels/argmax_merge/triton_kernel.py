"""`argmax_merge` in Triton: programs choose in chunks of a row, then one program a row chooses among the chunks.

Letters: R rows, V vocabulary ids of this shard, C chunks of a row, W ranks.
"""

import torch
import triton
import triton.language as tl

_NO_TOKEN: tl.constexpr = tl.constexpr(2**62)
_MERGE_ROWS = 64


@triton.jit
def _chunk_kernel(
    scores_ptr,
    value_ptr,
    column_ptr,
    vocab_size,
    num_chunks,
    stride_sr,
    stride_sv,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) // num_chunks
    chunk = tl.program_id(0) % num_chunks
    offs_v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    scores_v = tl.load(
        scores_ptr + row * stride_sr + offs_v.to(tl.int64) * stride_sv, mask=offs_v < vocab_size, other=float("-inf")
    ).to(tl.float32)
    scores_v = tl.where(scores_v == scores_v, scores_v, float("-inf"))
    value = tl.max(scores_v, axis=0)
    column = tl.min(tl.where(scores_v == value, offs_v, 2**31 - 1), axis=0)
    tl.store(value_ptr + row * num_chunks + chunk, value)
    tl.store(column_ptr + row * num_chunks + chunk, column)


@triton.jit(do_not_specialize=["vocab_offset"])
def _row_kernel(value_ptr, column_ptr, out_value_ptr, out_token_ptr, num_chunks, vocab_offset, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_chunks
    values_c = tl.load(value_ptr + row * num_chunks + offs_c, mask=mask_c, other=float("-inf"))
    columns_c = tl.load(column_ptr + row * num_chunks + offs_c, mask=mask_c, other=2**31 - 1)
    value = tl.max(values_c, axis=0)
    column = tl.min(tl.where(values_c == value, columns_c, 2**31 - 1), axis=0)
    token = tl.where(value == float("-inf"), -1, column.to(tl.int64) + vocab_offset)
    tl.store(out_value_ptr + row, value)
    tl.store(out_token_ptr + row, token)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    value_ptr,
    token_ptr,
    out_token_ptr,
    num_rows,
    stride_vw,
    stride_vr,
    stride_tw,
    stride_tr,
    NUM_RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < num_rows
    best_r = tl.full([BLOCK_R], float("-inf"), tl.float32)
    best_tokens_r = tl.full([BLOCK_R], _NO_TOKEN, tl.int64)
    for rank in tl.static_range(NUM_RANKS):
        values_r = tl.load(value_ptr + rank * stride_vw + offs_r * stride_vr, mask=mask_r, other=float("-inf"))
        tokens_r = tl.load(token_ptr + rank * stride_tw + offs_r * stride_tr, mask=mask_r, other=-1)
        values_r = tl.where(values_r == values_r, values_r, float("-inf"))
        is_better_r = (values_r > best_r) | ((values_r == best_r) & (tokens_r < best_tokens_r))
        best_r = tl.where(is_better_r, values_r, best_r)
        best_tokens_r = tl.where(is_better_r, tokens_r, best_tokens_r)
    tl.store(out_token_ptr + offs_r, tl.where(best_r == float("-inf"), -1, best_tokens_r), mask=mask_r)


def local_argmax(
    scores_RV: torch.Tensor, vocab_offset: int, *, block: int = 4096, num_warps: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer `ddtree_bench.kernels.argmax_merge.local_argmax`.

    Args:
        block: columns that a program reads at once.
        num_warps: warps of a program.
    """
    num_rows, vocab_size = scores_RV.shape
    value_R = torch.empty(num_rows, dtype=torch.float32, device=scores_RV.device)
    token_R = torch.empty(num_rows, dtype=torch.int64, device=scores_RV.device)
    if num_rows == 0:
        return value_R, token_R
    block_v = min(block, max(16, triton.next_power_of_2(vocab_size)))
    num_chunks = triton.cdiv(vocab_size, block_v)
    chunk_value_RC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=scores_RV.device)
    chunk_column_RC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=scores_RV.device)
    _chunk_kernel[(num_rows * num_chunks,)](
        scores_RV,
        chunk_value_RC,
        chunk_column_RC,
        vocab_size,
        num_chunks,
        *scores_RV.stride(),
        BLOCK_V=block_v,
        num_warps=num_warps,
    )
    _row_kernel[(num_rows,)](
        chunk_value_RC,
        chunk_column_RC,
        value_R,
        token_R,
        num_chunks,
        vocab_offset,
        BLOCK_C=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return value_R, token_R


def merge_argmax(value_WR: torch.Tensor, token_WR: torch.Tensor) -> torch.Tensor:
    """Answer `ddtree_bench.kernels.argmax_merge.merge_argmax`."""
    num_ranks, num_rows = value_WR.shape
    token_R = torch.empty(num_rows, dtype=torch.int64, device=value_WR.device)
    if num_rows:
        _merge_kernel[(triton.cdiv(num_rows, _MERGE_ROWS),)](
            value_WR,
            token_WR,
            token_R,
            num_rows,
            *value_WR.stride(),
            *token_WR.stride(),
            NUM_RANKS=num_ranks,
            BLOCK_R=_MERGE_ROWS,
            num_warps=2,
        )
    return token_R
