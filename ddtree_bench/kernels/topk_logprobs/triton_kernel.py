"""`topk_logprobs` in Triton: one pass over the logits, then one program a row that looks at the best groups only.

A row is cut into groups of consecutive ids, and eight groups make a block. The pass writes the largest logit of every
group and, for each tile of groups, the maximum and the sum of exponentials. Order blocks by their largest logit, then by
lower ids: the k best candidates lie in the k best blocks, because each block before another one holds a candidate before
all of the other's. The same holds for groups. So the second kernel selects k blocks, k groups among theirs, reads the
logits of those groups alone and selects k candidates: exact for any logits, ties included, with no sort of the row and
no atomics.

Selection works on integers that ascend with the logit. The k-th largest is found bit by bit, counting each time; what
lies above it is taken, and of what equals it the lowest ids.

Letters: R rows, V vocabulary ids of this shard, U blocks, G groups of a block, S ids of a group, T tiles of a row,
K candidates, W ranks.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree_bench.kernels.topk_logprobs.partials import TopkPartials

_LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
_NO_TOKEN: tl.constexpr = tl.constexpr(2**62)
_GROUP, _NUM_GROUPS = 32, 8  # ids of a group, groups of a block
# The low bits of a float32 that are the same for every value of one sign, by the dtype that it came from.
_NUM_IDLE_BITS = {torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _clean(logits):
    """Turn NaN into −inf and −0 into +0, in float32."""
    wide = logits.to(tl.float32)
    return tl.where(wide == wide, wide, float("-inf")) + 0.0


@triton.jit
def _key_of(logits, NUM_IDLE_BITS: tl.constexpr):
    """Make integers that ascend with clean logits."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> NUM_IDLE_BITS


@triton.jit
def _logit_of(keys, NUM_IDLE_BITS: tl.constexpr):
    """Undo `_key_of`."""
    ascending = keys << NUM_IDLE_BITS
    bits = tl.where(ascending < 0, (ascending | ((1 << NUM_IDLE_BITS) - 1)) ^ 0x7FFFFFFF, ascending)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _kth_largest(keys, k, NUM_IDLE_BITS: tl.constexpr):
    """Find the largest integer that at least k keys reach, from the sign down."""
    zero = tl.min(keys, axis=0) * 0
    is_reached = tl.sum((keys >= 0).to(tl.int32), axis=0) >= k
    threshold = tl.where(is_reached, zero, zero - (1 << (31 - NUM_IDLE_BITS)) if NUM_IDLE_BITS else zero + (-(2**31)))
    for place in range(1, 32 - NUM_IDLE_BITS):
        higher = threshold + (1 << (31 - NUM_IDLE_BITS - place))
        is_reached = tl.sum((keys >= higher).to(tl.int32), axis=0) >= k
        threshold = tl.where(is_reached, higher, threshold)
    return threshold


@triton.jit
def _places(keys, k, threshold):
    """Give each of the k best keys its place in order of ids, and −1 to the others; of equals the lowest ids win."""
    is_above = keys > threshold
    is_equal = keys == threshold
    counts = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), axis=0)
    num_above = counts & 0xFFFF
    num_equal = counts >> 16
    num_wanted = k - tl.sum(is_above.to(tl.int32), axis=0)
    is_taken = is_above | (is_equal & (num_equal <= num_wanted))
    return tl.where(is_taken, num_above + tl.minimum(num_equal, num_wanted) - 1, -1)


@triton.jit
def _take(keys, values, k, values_ptr, NUM_IDLE_BITS: tl.constexpr):
    """Write the values of the k best keys in order of ids; every thread sees them afterwards."""
    places = _places(keys, k, _kth_largest(keys, k, NUM_IDLE_BITS))
    tl.store(values_ptr + places, values, mask=places >= 0)
    tl.debug_barrier()
    return places


@triton.jit(do_not_specialize=["num_all_tiles"])
def _group_kernel(
    logits_ptr,
    group_key_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    scale,
    vocab_size,
    num_blocks,
    num_tiles,
    num_all_tiles,
    stride_lr,
    stride_lv,
    NUM_IDLE_BITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    num_groups = num_blocks * NUM_GROUPS
    for place in tl.range(tl.program_id(0), num_all_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tl.cast(place, tl.int64) // num_tiles
        tile = place % num_tiles
        offs_g = tile * BLOCK_G + tl.arange(0, BLOCK_G)
        offs_gs = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        from_gs = row * stride_lr + offs_gs.to(tl.int64) * stride_lv
        logits_gs = tl.load(logits_ptr + from_gs, mask=offs_gs < vocab_size, other=float("-inf")).to(tl.float32)

        max_g = _clean(tl.max(logits_gs, axis=1))  # a maximum passes over NaN, so that cleaning it is enough
        tl.store(group_key_ptr + row * num_groups + offs_g, _key_of(max_g, NUM_IDLE_BITS), mask=offs_g < num_groups)
        tile_max = tl.max(max_g, axis=0)
        shift = tl.where(tl.abs(tile_max) == float("inf"), 0.0, tile_max) * scale  # −inf − −inf is NaN
        tile_sum = tl.sum(tl.exp2(tl.fma(logits_gs, scale, -shift)))
        if tile_sum != tile_sum:  # a NaN among the logits: count it as probability 0
            tile_sum = tl.sum(tl.exp2(tl.fma(_clean(logits_gs), scale, -shift)))
        # Undo the rounding of the shift, which every term of the sum has in common.
        is_finite = tl.abs(tile_max) < float("inf")
        tile_sum = tl.where(is_finite, tile_sum * tl.exp2(-tl.fma(tile_max, scale, -shift)), tile_sum)
        tl.store(tile_max_ptr + row * num_tiles + tile, tile_max)
        tl.store(tile_sum_ptr + row * num_tiles + tile, tile_sum)


@triton.jit(do_not_specialize=["vocab_offset"])
def _select_kernel(
    logits_ptr,
    group_key_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    scratch_ptr,
    out_logits_ptr,
    out_tokens_ptr,
    out_lse_ptr,
    scale,
    temperature,
    vocab_size,
    vocab_offset,
    num_blocks,
    num_tiles,
    stride_lr,
    stride_lv,
    K: tl.constexpr,
    NUM_IDLE_BITS: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    least = _key_of(tl.full([1], float("-inf"), tl.float32), NUM_IDLE_BITS)

    row_keys_ptr = group_key_ptr + row * num_blocks * NUM_GROUPS
    offs_u = tl.arange(0, BLOCK_U)
    offs_ug = offs_u[:, None] * NUM_GROUPS + tl.arange(0, NUM_GROUPS)[None, :]
    mask_u = offs_u < num_blocks
    keys_u = tl.max(tl.load(row_keys_ptr + offs_ug, mask=mask_u[:, None], other=0).to(tl.int32), axis=1)

    offs_t = tl.arange(0, BLOCK_T)
    maxima_t = tl.load(tile_max_ptr + row * num_tiles + offs_t, mask=offs_t < num_tiles, other=float("-inf"))
    sums_t = tl.load(tile_sum_ptr + row * num_tiles + offs_t, mask=offs_t < num_tiles, other=0.0)
    row_max = tl.max(maxima_t, axis=0)
    shift = tl.where(tl.abs(row_max) == float("inf"), 0.0, row_max)
    row_sum = tl.sum(sums_t * tl.exp2((maxima_t - shift) * scale), axis=0)
    lse = tl.div_rn(shift, temperature) + tl.log(row_sum)
    lse = tl.where(tl.abs(row_max) == float("inf"), row_max, lse)
    tl.store(out_lse_ptr + row, lse)

    blocks_ptr = scratch_ptr + row * (4 * BLOCK_K)
    groups_ptr = blocks_ptr + BLOCK_K
    columns_ptr = groups_ptr + BLOCK_K
    keys_ptr = columns_ptr + BLOCK_K
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    _take(tl.where(mask_u, keys_u, least), offs_u, K, blocks_ptr, NUM_IDLE_BITS)

    # Blocks and groups beyond the row, there where K is more than the row has, are read as −inf.
    blocks_k = tl.load(blocks_ptr + offs_k, mask=mask_k, other=num_blocks)
    offs_kg = blocks_k[:, None] * NUM_GROUPS + tl.arange(0, NUM_GROUPS)[None, :]
    mask_kg = (blocks_k < num_blocks)[:, None]
    keys_kg = tl.load(row_keys_ptr + offs_kg, mask=mask_kg, other=0).to(tl.int32)
    keys_kg = tl.where(mask_kg, keys_kg, least[:, None])
    keys_n, groups_n = tl.reshape(keys_kg, [BLOCK_K * NUM_GROUPS]), tl.reshape(offs_kg, [BLOCK_K * NUM_GROUPS])
    _take(keys_n, groups_n, K, groups_ptr, NUM_IDLE_BITS)

    groups_k = tl.load(groups_ptr + offs_k, mask=mask_k, other=num_blocks * NUM_GROUPS)
    offs_ks = groups_k[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    from_ks = row * stride_lr + offs_ks.to(tl.int64) * stride_lv
    logits_ks = _clean(tl.load(logits_ptr + from_ks, mask=offs_ks < vocab_size, other=float("-inf")))
    keys_m = tl.reshape(_key_of(logits_ks, NUM_IDLE_BITS), [BLOCK_K * GROUP])
    places_m = _take(keys_m, tl.reshape(offs_ks, [BLOCK_K * GROUP]), K, columns_ptr, NUM_IDLE_BITS)
    tl.store(keys_ptr + places_m, keys_m, mask=places_m >= 0)
    tl.debug_barrier()

    # The k candidates stand in order of ids: a candidate's rank is how many are larger, or equal and before it.
    keys_k = tl.load(keys_ptr + offs_k, mask=mask_k, other=0)
    columns_k = tl.load(columns_ptr + offs_k, mask=mask_k, other=0)
    offs_j = tl.arange(0, BLOCK_K)
    keys_j = tl.load(keys_ptr + offs_j, mask=offs_j < K, other=0)
    is_earlier_kj = (keys_j[None, :] == keys_k[:, None]) & (offs_j[None, :] < offs_k[:, None])
    is_before_kj = ((keys_j[None, :] > keys_k[:, None]) | is_earlier_kj) & (offs_j < K)[None, :]
    ranks_k = tl.sum(is_before_kj.to(tl.int32), axis=1)
    top_logits_k = _logit_of(keys_k, NUM_IDLE_BITS)
    is_real_k = top_logits_k > float("-inf")
    if IS_NORMALISED:
        top_logits_k = tl.where(is_real_k, tl.div_rn(top_logits_k, temperature) - lse, float("-inf"))
    tokens_k = tl.where(is_real_k, columns_k.to(tl.int64) + vocab_offset, -1)
    tl.store(out_logits_ptr + row * K + ranks_k, top_logits_k, mask=mask_k)
    tl.store(out_tokens_ptr + row * K + ranks_k, tokens_k, mask=mask_k)


@triton.jit
def _merge_kernel(
    logits_ptr,
    tokens_ptr,
    lse_ptr,
    out_logprobs_ptr,
    out_tokens_ptr,
    temperature,
    num_places,
    stride_lw,
    stride_lr,
    stride_lk,
    stride_tw,
    stride_tr,
    stride_tk,
    stride_sw,
    stride_sr,
    K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_w = tl.arange(0, BLOCK_W)
    mask_w = offs_w < NUM_RANKS
    lse_w = tl.load(lse_ptr + offs_w.to(tl.int64) * stride_sw + row * stride_sr, mask=mask_w, other=float("-inf"))
    lse_max = tl.max(lse_w, axis=0)
    shift = tl.where(tl.abs(lse_max) == float("inf"), 0.0, lse_max)
    lse = shift + tl.log(tl.sum(tl.exp2((lse_w - shift) * _LOG2_E), axis=0))
    lse = tl.where(tl.abs(lse_max) == float("inf"), lse_max, lse)

    # A candidate's rank is how many of all ranks' candidates come before it.
    offs_k = tl.arange(0, BLOCK_K)
    offs_j = tl.arange(0, BLOCK_K)
    logits_row_ptr = logits_ptr + row * stride_lr
    tokens_row_ptr = tokens_ptr + row * stride_tr
    for rank in tl.static_range(NUM_RANKS):
        mask_k = offs_k < num_places
        from_k = rank * stride_lw + offs_k.to(tl.int64) * stride_lk
        logits_k = _clean(tl.load(logits_row_ptr + from_k, mask=mask_k, other=float("-inf")))
        from_k = rank * stride_tw + offs_k.to(tl.int64) * stride_tk
        tokens_k = tl.load(tokens_row_ptr + from_k, mask=mask_k, other=_NO_TOKEN)
        ranks_k = tl.zeros([BLOCK_K], tl.int32)
        for other in range(NUM_RANKS):
            mask_j = offs_j < num_places
            from_j = other * stride_lw + offs_j.to(tl.int64) * stride_lk
            logits_j = _clean(tl.load(logits_row_ptr + from_j, mask=mask_j, other=float("-inf")))
            from_j = other * stride_tw + offs_j.to(tl.int64) * stride_tk
            tokens_j = tl.load(tokens_row_ptr + from_j, mask=mask_j, other=_NO_TOKEN)
            is_equal_kj = logits_j[None, :] == logits_k[:, None]
            is_lower_kj = tokens_j[None, :] < tokens_k[:, None]
            is_earlier_kj = other * BLOCK_K + offs_j[None, :] < rank * BLOCK_K + offs_k[:, None]
            is_lower_kj = is_lower_kj | ((tokens_j[None, :] == tokens_k[:, None]) & is_earlier_kj)
            is_before_kj = (logits_j[None, :] > logits_k[:, None]) | (is_equal_kj & is_lower_kj)
            ranks_k += tl.sum((is_before_kj & mask_j[None, :]).to(tl.int32), axis=1)
        is_real_k = (logits_k > float("-inf")) & (tokens_k >= 0)
        logprobs_k = tl.where(is_real_k, tl.div_rn(logits_k, temperature) - lse, float("-inf"))
        is_kept_k = mask_k & (ranks_k < K)
        tl.store(out_logprobs_ptr + row * K + ranks_k, logprobs_k, mask=is_kept_k)
        tl.store(out_tokens_ptr + row * K + ranks_k, tl.where(logits_k > float("-inf"), tokens_k, -1), mask=is_kept_k)


@dataclass(frozen=True, kw_only=True)
class TopkConfig:
    """How the work is cut.

    Args:
        tile: ids that a program of the pass reads at once; a multiple of 256.
        num_warps: warps of a program of the pass.
        num_stages: tiles in flight of a program of the pass; 1 gives every tile a program of its own.
        programs_per_sm: programs of the pass on one multiprocessor, where num_stages is more than 1.
        num_select_warps: warps of a program of the selection.
    """

    tile: int = 8192
    num_warps: int = 4
    num_stages: int = 1
    programs_per_sm: int = 4
    num_select_warps: int = 4


def topk_partials(
    logits_RV: torch.Tensor, k: int, *, vocab_offset: int, temperature: float, config: TopkConfig | None = None
) -> TopkPartials:
    """Answer `ddtree_bench.kernels.topk_logprobs.topk_partials`."""
    logits_RK, tokens_RK, lse_R = _launch(logits_RV, k, vocab_offset, temperature, is_normalised=False, config=config)
    return TopkPartials(logits_RK=logits_RK, tokens_RK=tokens_RK, lse_R=lse_R)


def topk_logprobs(
    logits_RV: torch.Tensor, k: int, *, temperature: float, config: TopkConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer `ddtree_bench.kernels.topk_logprobs.topk_logprobs`: the selection normalises, so that nothing is merged."""
    logprobs_RK, tokens_RK, _ = _launch(logits_RV, k, 0, temperature, is_normalised=True, config=config)
    return logprobs_RK, tokens_RK


def _launch(
    logits_RV: torch.Tensor, k: int, vocab_offset: int, temperature: float, *, is_normalised: bool, config: TopkConfig | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities or raw logits, tokens, log-sum-exps."""
    config = config or TopkConfig()
    num_rows, vocab_size = logits_RV.shape

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_RV.device)

    values_RK, tokens_RK = empty(torch.float32, num_rows, k), empty(torch.int64, num_rows, k)
    lse_R = empty(torch.float32, num_rows)
    if num_rows == 0:
        return values_RK, tokens_RK, lse_R
    block_k = triton.next_power_of_2(k)
    num_blocks, num_tiles = triton.cdiv(vocab_size, _GROUP * _NUM_GROUPS), triton.cdiv(vocab_size, config.tile)
    num_idle_bits = _NUM_IDLE_BITS.get(logits_RV.dtype, 0)
    key_dtype = torch.int16 if num_idle_bits == 16 else torch.int32
    group_keys_RUG = empty(key_dtype, num_rows, num_blocks, _NUM_GROUPS)
    tile_max_RT, tile_sum_RT = empty(torch.float32, num_rows, num_tiles), empty(torch.float32, num_rows, num_tiles)
    groups = {"NUM_GROUPS": _NUM_GROUPS, "GROUP": _GROUP, "NUM_IDLE_BITS": num_idle_bits}
    scale = math.log2(math.e) / temperature
    num_all_tiles = num_rows * num_tiles
    _group_kernel[(min(num_all_tiles, _num_programs(logits_RV.device, config)),)](
        logits_RV,
        group_keys_RUG,
        tile_max_RT,
        tile_sum_RT,
        scale,
        vocab_size,
        num_blocks,
        num_tiles,
        num_all_tiles,
        *logits_RV.stride(),
        **groups,
        BLOCK_G=config.tile // _GROUP,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    _select_kernel[(num_rows,)](
        logits_RV,
        group_keys_RUG,
        tile_max_RT,
        tile_sum_RT,
        empty(torch.int32, num_rows, 4, block_k),
        values_RK,
        tokens_RK,
        lse_R,
        scale,
        temperature,
        vocab_size,
        vocab_offset,
        num_blocks,
        num_tiles,
        *logits_RV.stride(),
        **groups,
        K=k,
        IS_NORMALISED=is_normalised,
        BLOCK_U=max(triton.next_power_of_2(num_blocks), block_k),
        BLOCK_T=triton.next_power_of_2(num_tiles),
        BLOCK_K=block_k,
        num_warps=config.num_select_warps,
    )
    return values_RK, tokens_RK, lse_R


def _num_programs(device: torch.device, config: TopkConfig) -> int:
    """Return the most programs of the pass."""
    if config.num_stages == 1 or device.type != "cuda":
        return 2**31 - 1
    return torch.cuda.get_device_properties(device).multi_processor_count * config.programs_per_sm


def merge_topk_partials(
    logits_WRK: torch.Tensor, tokens_WRK: torch.Tensor, lse_WR: torch.Tensor, k: int, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer `ddtree_bench.kernels.topk_logprobs.merge_topk_partials`."""
    num_ranks, num_rows, num_places = logits_WRK.shape
    logprobs_RK = torch.empty(num_rows, k, dtype=torch.float32, device=logits_WRK.device)
    tokens_RK = torch.empty(num_rows, k, dtype=torch.int64, device=logits_WRK.device)
    if num_rows:
        _merge_kernel[(num_rows,)](
            logits_WRK,
            tokens_WRK,
            lse_WR,
            logprobs_RK,
            tokens_RK,
            temperature,
            num_places,
            *logits_WRK.stride(),
            *tokens_WRK.stride(),
            *lse_WR.stride(),
            K=k,
            NUM_RANKS=num_ranks,
            BLOCK_W=triton.next_power_of_2(num_ranks),
            BLOCK_K=triton.next_power_of_2(num_places),
            num_warps=4,
        )
    return logprobs_RK, tokens_RK
