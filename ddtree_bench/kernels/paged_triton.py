"""What the Triton implementations of the attention operations share: the kernels, their configs and the launch.

Queries of one key/value head are packed: the rows of a tile are (node, query head of the group), so that a key is read
once for all heads that share it. A sequence's keys, prefix and window, are cut into equal splits on the device; each
split leaves a normalised output and its log-sum-exp (base 2), and a second kernel merges them (flash-decoding). With
one split nothing is left and nothing merged. Only the key blocks that reach beyond the prefix look at a mask.

Why no access is out of bounds. Tiles: an item below the sum of all tiles belongs to a sequence below B; other items
touch only rows from the last start to T. Rows: queries, outputs and partials are masked by the sequence's rows. Pages:
every read of the table, the one a block ahead too, is masked by the slots that a row of it has. Keys without a mask:
a split ends at a multiple of BLOCK_N or beyond the prefix, so a loop that stops at min(end, prefix rounded down) reads
positions of the prefix only. Other keys: masked by position < end ≤ prefix + nodes, and an own key by position ≥ prefix.
Mask: read where 0 ≤ column < window and node < window only; a block is looked at here only if the split ends at or
beyond the prefix, so positions before the window are all in it. What lies beyond a sequence's pages in its row of the
table may be anything: it is read, and never followed.

Letters: B sequences, T packed tokens, N window, H query heads, G key/value heads, E head size, P pages, S slots of a
page, C splits. In kernels M rows of a tile, N keys of a block, E head size.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
_PROCESSORS_WITHOUT_A_GPU = 4  # the interpreter's: few, so that few programs run, and more than one, so that splits merge
_FEW_SLOTS = 4096  # of all sequences; blocks of 128 keys would make too few splits to fill the device

CAUSAL, MASK, OWN = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Tile sizes of one launch.

    block_m rows a program; block_n keys a step; min_blocks steps a split at least; programs_per_sm is what the choice of
    splits takes a multiprocessor to run at once.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    programs_per_sm: int = 1
    min_blocks: int = 2


def choose_config(num_rows: int, head_size: int, dtype: torch.dtype, num_slots: int) -> AttentionConfig:
    """Choose tile sizes for the rows (nodes × query heads of a group) of a window and the slots of the whole page table."""
    if dtype == torch.float32:
        return AttentionConfig(block_m=16, block_n=32 if head_size <= 128 else 16, num_stages=1, programs_per_sm=2)
    if num_rows <= 16:
        return AttentionConfig(block_m=16, block_n=64, num_stages=3, programs_per_sm=2 if head_size <= 128 else 1)
    if head_size > 128:
        return AttentionConfig(block_m=128, block_n=32, num_warps=8, num_stages=3)
    if num_rows <= 64:
        return AttentionConfig(block_m=64, block_n=64, num_stages=3, programs_per_sm=2)
    block_n = 64 if num_rows <= 128 and num_slots <= _FEW_SLOTS else 128
    return AttentionConfig(block_m=128, block_n=block_n, num_warps=8, num_stages=3)


def choose_num_splits(num_programs: int, num_blocks: int, config: AttentionConfig, num_processors: int) -> int:
    """Choose into how many splits the keys of a sequence are cut, from sizes that the host knows.

    Programs run in rounds of `num_processors × programs_per_sm`. The time of a choice is rounds × (blocks of a split +
    the 3 that a start is worth) + what merging adds; the smallest wins, fewer splits first.

    Args:
        num_programs: programs of one split.
        num_blocks: blocks of keys that the page table can hold.
        config: the launch's tile sizes.
        num_processors: multiprocessors of the device.
    """
    slots = num_processors * config.programs_per_sm
    most = max(1, min(-(-num_blocks // config.min_blocks), 4 * slots // num_programs, 128))

    def cost(num_splits: int) -> float:
        rounds = -(-num_programs * num_splits // slots)
        return rounds * (-(-num_blocks // num_splits) + 3) + (2 + num_splits / 8 if num_splits > 1 else 0)

    return min(range(1, most + 1), key=cost)


def attend_paged(
    q_THE: torch.Tensor,
    k_cache_PSGE: torch.Tensor,
    v_cache_PSGE: torch.Tensor,
    page_table_BP: torch.Tensor,
    prefix_lengths_B: torch.Tensor,
    query_starts_B1: torch.Tensor,
    *,
    scale: float,
    visibility_BNN: torch.Tensor | None = None,
    own_k_TGE: torch.Tensor | None = None,
    own_v_TGE: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Launch attention over pages and a window; the window's keys are in the pages, or given as `own_k_TGE`.

    Args:
        visibility_BNN: as in `tree_attention`; not used with `own_k_TGE`, whose window has no mask.
        config: tile sizes; None chooses.
        num_splits: splits of a sequence's keys; None chooses. With both given, the answer for a sequence is the same
            to the last bit whatever the batch.

    Returns:
        out_THE: of the queries' dtype, in new memory.
    """
    num_tokens, num_heads, head_size = q_THE.shape
    page_size, num_kv_heads = k_cache_PSGE.shape[1:3]
    batch_size, num_pages = page_table_BP.shape
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    if out_THE.numel() == 0:
        return out_THE
    group_size = num_heads // num_kv_heads
    window = OWN if own_k_TGE is not None else CAUSAL if visibility_BNN is None else MASK
    # How long each window is only the device knows. The choices below suppose equal ones; the grid has room for any.
    num_rows = max(triton.cdiv(num_tokens, max(batch_size, 1)), 1) * group_size
    config = config or choose_config(num_rows, head_size, q_THE.dtype, batch_size * num_pages * page_size)
    num_items = num_tokens * group_size // config.block_m + batch_size
    if visibility_BNN is not None:
        widest = max(min(num_tokens, visibility_BNN.shape[1]) * group_size, 1)
        num_items = min(num_items, batch_size * triton.cdiv(widest, config.block_m))
    if num_splits is None:
        num_tiles = triton.cdiv(num_rows, config.block_m) * batch_size * num_kv_heads
        num_blocks = triton.cdiv(num_pages * page_size, config.block_n)
        num_splits = choose_num_splits(max(num_tiles, 1), max(num_blocks, 1), config, _num_processors(q_THE.device))
    partial_THCE = lse_THC = None
    if num_splits > 1:
        partial_THCE = torch.empty(num_tokens, num_heads, num_splits, head_size, dtype=torch.float32, device=q_THE.device)
        lse_THC = torch.empty(num_tokens, num_heads, num_splits, dtype=torch.float32, device=q_THE.device)
    q_rows_THE, k_PSGE, v_PSGE = (
        _with_whole_rows(rows) for rows in (q_THE if scale >= 0 else -q_THE, k_cache_PSGE, v_cache_PSGE)
    )
    own_k_rows, own_v_rows = (None if rows is None else _with_whole_rows(rows) for rows in (own_k_TGE, own_v_TGE))
    own_strides = [n for rows in (own_k_rows, own_v_rows) for n in ((0, 0) if rows is None else rows.stride()[:2])]
    # With a lone split nothing merges later, so programs without a tile, one at least, clear the rows of no sequence.
    grid = (num_items + (num_splits == 1), num_kv_heads, num_splits)
    attention_kernel[grid](
        q_rows_THE,
        k_PSGE,
        v_PSGE,
        own_k_rows,
        own_v_rows,
        None if visibility_BNN is None else visibility_BNN.view(torch.uint8),
        page_table_BP,
        prefix_lengths_B,
        query_starts_B1,
        out_THE,
        partial_THCE,
        lse_THC,
        abs(scale) * _LOG2_E,
        num_tokens,
        batch_size,
        num_splits,
        num_pages * page_size,
        0 if visibility_BNN is None else visibility_BNN.shape[1],
        *q_rows_THE.stride()[:2],
        *k_PSGE.stride()[:3],
        *v_PSGE.stride()[:3],
        *own_strides,
        *((0, 0, 0) if visibility_BNN is None else visibility_BNN.stride()),
        *page_table_BP.stride(),
        prefix_lengths_B.stride(0),
        query_starts_B1.stride(0),
        GROUP=group_size,
        HEAD_SIZE=head_size,
        PAGE_SIZE=page_size,
        WINDOW=window,
        IS_SPLIT=num_splits > 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_E=max(16, triton.next_power_of_2(head_size)),
        BLOCK_B=max(32, triton.next_power_of_2(batch_size)),
        MIN_BLOCKS=config.min_blocks,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        heads_block = min(4, triton.next_power_of_2(num_heads))
        merge_splits_kernel[(num_tokens, triton.cdiv(num_heads, heads_block))](
            partial_THCE,
            lse_THC,
            prefix_lengths_B,
            query_starts_B1,
            out_THE,
            batch_size,
            num_heads,
            num_splits,
            prefix_lengths_B.stride(0),
            query_starts_B1.stride(0),
            HEAD_SIZE=head_size,
            BLOCK_B=max(32, triton.next_power_of_2(batch_size)),
            BLOCK_H=heads_block,
            BLOCK_C=min(8, triton.next_power_of_2(num_splits)),
            BLOCK_N=config.block_n,
            BLOCK_E=triton.next_power_of_2(head_size),
            MIN_BLOCKS=config.min_blocks,
            num_warps=2,
        )
    return out_THE


def _with_whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied only where its last axis is not contiguous, which that of caches and projections always is."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_WITHOUT_A_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _blocks_of_split(num_keys, num_splits, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Count the key blocks of a split; the merge counts the splits in use from it."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits), MIN_BLOCKS)


@triton.jit
def _load_pages(table_ptr, position_n, num_slots, stride_tp, PAGE_SIZE: tl.constexpr):
    return tl.load(table_ptr + (position_n // PAGE_SIZE).to(tl.int64) * stride_tp, mask=position_n < num_slots, other=0)


@triton.jit
def _see(node, position, prefix_length, end, visibility_ptr, window_width, stride_mi, stride_mj, WINDOW: tl.constexpr):
    """Say whether nodes see positions; both broadcast against each other, in either order."""
    if WINDOW == 0:
        is_seen = (position <= prefix_length + node) & (position < end)
    elif WINDOW == 1:
        column = position - prefix_length
        is_inside = (column >= 0) & (position < end) & (column < window_width) & (node < window_width)
        offset = node.to(tl.int64) * stride_mi + column.to(tl.int64) * stride_mj
        is_seen = (column < 0) | (tl.load(visibility_ptr + offset, mask=is_inside, other=0) != 0)
    else:
        is_seen = (position < end) & (node >= 0)
    return is_seen


@triton.jit
def _load_rows(cache_ptr, row_n, mask_n, offs_e, HEAD_SIZE: tl.constexpr, BLOCK_E: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Load [N, E]; with ALL_ROWS mask_n is not looked at."""
    ptrs = cache_ptr + row_n[:, None] + offs_e[None, :]
    if ALL_ROWS and HEAD_SIZE == BLOCK_E:
        rows = tl.load(ptrs)
    elif ALL_ROWS:
        rows = tl.load(ptrs, mask=offs_e[None, :] < HEAD_SIZE, other=0.0)
    elif HEAD_SIZE == BLOCK_E:
        rows = tl.load(ptrs, mask=mask_n[:, None], other=0.0)
    else:
        rows = tl.load(ptrs, mask=mask_n[:, None] & (offs_e[None, :] < HEAD_SIZE), other=0.0)
    return rows


@triton.jit
def _store_rows(
    acc,
    max_m,
    sum_m,
    out_ptr,
    partial_ptr,
    lse_ptr,
    token_m,
    head_m,
    mask_m,
    offs_e,
    split,
    num_splits,
    num_heads,
    HEAD_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Divide by the sums and store; a row that saw nothing is 0."""
    is_blind = sum_m == 0
    factor = tl.where(is_blind, 0.0, 1.0 / tl.where(is_blind, 1.0, sum_m))
    row = token_m * num_heads + head_m
    if IS_SPLIT:
        lse = tl.where(is_blind, float("-inf"), max_m + tl.log2(tl.where(is_blind, 1.0, sum_m)))
        row = row * num_splits + split
        tl.store(lse_ptr + row, lse, mask=mask_m)
        base_ptr = partial_ptr
    else:
        base_ptr = out_ptr
    ptrs = base_ptr + row[:, None] * HEAD_SIZE + offs_e[None, :]
    mask = mask_m[:, None] & (offs_e[None, :] < HEAD_SIZE)
    tl.store(ptrs, (acc * factor[:, None]).to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_rows(q, k, v, max_m, sum_m, acc, scale, seen, MASKED: tl.constexpr):
    """One online-softmax step. Unmasked, every row sees every key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores * scale, float("-inf"))
        new_max = tl.maximum(max_m, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(max_m - shift)
    else:
        new_max = tl.maximum(max_m, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        decay = tl.exp2(max_m - new_max)
    sum_m = sum_m * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_max, sum_m, acc


@triton.jit
def _attend_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    own_k_ptr,
    own_v_ptr,
    visibility_ptr,
    table_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    row_start,
    num_rows,
    first_token,
    first_head,
    num_heads,
    prefix_length,
    first_key,
    end_key,
    num_slots,
    window_width,
    split,
    num_splits,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_ks,
    stride_vp,
    stride_vs,
    stride_okt,
    stride_ovt,
    stride_mi,
    stride_mj,
    stride_tp,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend rows [row_start, row_start + BLOCK_M) of one head to keys [first_key, end_key)."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_e = tl.arange(0, BLOCK_E)
    offs_m = row_start + tl.arange(0, BLOCK_M)
    node_m = offs_m // GROUP
    head_m = offs_m % GROUP
    mask_m = offs_m < num_rows
    q_row_m = node_m.to(tl.int64) * stride_qt + head_m.to(tl.int64) * stride_qh
    q = _load_rows(q_ptr, q_row_m, mask_m, offs_e, HEAD_SIZE, BLOCK_E, False)
    max_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_m = tl.zeros([BLOCK_M], tl.float32)
    acc_me = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    # Blocks inside the prefix: everything is seen. The pages of a block are read one block ahead.
    first_masked = tl.maximum(first_key, tl.minimum(end_key, prefix_length // BLOCK_N * BLOCK_N))
    page_n = _load_pages(table_ptr, first_key + offs_n, num_slots, stride_tp, PAGE_SIZE)
    for start in tl.range(first_key, first_masked, BLOCK_N, num_stages=STAGES):
        slot_n = ((start + offs_n) % PAGE_SIZE).to(tl.int64)
        k_row_n = page_n.to(tl.int64) * stride_kp + slot_n * stride_ks
        v_row_n = page_n.to(tl.int64) * stride_vp + slot_n * stride_vs
        page_n = _load_pages(table_ptr, start + BLOCK_N + offs_n, num_slots, stride_tp, PAGE_SIZE)
        k = _load_rows(k_ptr, k_row_n, offs_n, offs_e, HEAD_SIZE, BLOCK_E, True)
        v = _load_rows(v_ptr, v_row_n, offs_n, offs_e, HEAD_SIZE, BLOCK_E, True)
        max_m, sum_m, acc_me = _add_rows(q, k, v, max_m, sum_m, acc_me, scale, offs_n, False)

    # Blocks that reach beyond the prefix. A key that no row sees may hold NaN, and 0 × NaN is NaN: it is not read.
    for start in tl.range(first_masked, end_key, BLOCK_N, num_stages=1):
        position_n = start + offs_n
        seen_mn = _see(
            node_m[:, None],
            position_n[None, :],
            prefix_length,
            end_key,
            visibility_ptr,
            window_width,
            stride_mi,
            stride_mj,
            WINDOW,
        )
        mask_n = position_n < end_key
        if WINDOW == 1:
            is_seen_n = tl.max((seen_mn & mask_m[:, None]).to(tl.int32), 0)
            mask_n = mask_n & (is_seen_n != 0)
        slot_n = (position_n % PAGE_SIZE).to(tl.int64)
        page_n = _load_pages(table_ptr, position_n, num_slots, stride_tp, PAGE_SIZE)
        k_row_n = page_n.to(tl.int64) * stride_kp + slot_n * stride_ks
        v_row_n = page_n.to(tl.int64) * stride_vp + slot_n * stride_vs
        if WINDOW == 2:
            is_own_n = position_n >= prefix_length
            token_n = (position_n - prefix_length).to(tl.int64)
            mask_own_n = mask_n & is_own_n
            mask_n = mask_n & (position_n < prefix_length)
            own_k = _load_rows(own_k_ptr, token_n * stride_okt, mask_own_n, offs_e, HEAD_SIZE, BLOCK_E, False)
            own_v = _load_rows(own_v_ptr, token_n * stride_ovt, mask_own_n, offs_e, HEAD_SIZE, BLOCK_E, False)
        k = _load_rows(k_ptr, k_row_n, mask_n, offs_e, HEAD_SIZE, BLOCK_E, False)
        v = _load_rows(v_ptr, v_row_n, mask_n, offs_e, HEAD_SIZE, BLOCK_E, False)
        if WINDOW == 2:
            k = tl.where(is_own_n[:, None], own_k, k)
            v = tl.where(is_own_n[:, None], own_v, v)
        max_m, sum_m, acc_me = _add_rows(q, k, v, max_m, sum_m, acc_me, scale, seen_mn, True)

    _store_rows(
        acc_me,
        max_m,
        sum_m,
        out_ptr,
        partial_ptr,
        lse_ptr,
        first_token + node_m,
        first_head + head_m,
        mask_m,
        offs_e,
        split,
        num_splits,
        num_heads,
        HEAD_SIZE,
        IS_SPLIT,
    )


# What follows a batch's or a request's size is not compiled in; nor are strides that follow it.
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "batch_size",
        "num_splits",
        "num_slots",
        "window_width",
        "stride_mb",
        "stride_mi",
        "stride_tb",
    ]
)
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    own_k_ptr,
    own_v_ptr,
    visibility_ptr,
    table_ptr,
    prefix_ptr,
    starts_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    num_tokens,
    batch_size,
    num_splits,
    num_slots,
    window_width,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_ks,
    stride_kg,
    stride_vp,
    stride_vs,
    stride_vg,
    stride_okt,
    stride_okg,
    stride_ovt,
    stride_ovg,
    stride_mb,
    stride_mi,
    stride_mj,
    stride_tb,
    stride_tp,
    stride_pb,
    stride_sb,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend one tile of rows to one split of keys: grid (tiles of all sequences, key/value heads, splits)."""
    # Tiles of a sequence, which read the same keys, run next to each other.
    item = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < batch_size
    start_b = tl.load(starts_ptr + offs_b.to(tl.int64) * stride_sb, mask=mask_b, other=0)
    end_b = tl.load(starts_ptr + (offs_b + 1).to(tl.int64) * stride_sb, mask=mask_b, other=0)
    rows_b = (end_b - start_b).to(tl.int32) * GROUP
    tiles_b = tl.cdiv(rows_b, BLOCK_M)
    tiles_until_b = tl.cumsum(tiles_b, 0)
    num_items = tl.sum(tiles_b, 0)
    if item >= num_items:
        if not IS_SPLIT:
            first_unused = tl.max(end_b, 0).to(tl.int64)
            offs_e = tl.arange(0, BLOCK_E)
            offs_h = tl.arange(0, BLOCK_M)
            for token in range(first_unused + item - num_items, num_tokens, tl.num_programs(0) - num_items):
                for first in range(0, GROUP, BLOCK_M):
                    row_h = token * num_heads + kv_head * GROUP + first + offs_h
                    tl.store(
                        out_ptr + row_h[:, None] * HEAD_SIZE + offs_e[None, :],
                        tl.zeros([BLOCK_M, BLOCK_E], out_ptr.dtype.element_ty),
                        mask=((first + offs_h) < GROUP)[:, None] & (offs_e[None, :] < HEAD_SIZE),
                    )
        return
    is_before_b = mask_b & (tiles_until_b <= item)
    sequence = tl.sum(is_before_b.to(tl.int32), 0).to(tl.int64)
    tile = item - tl.sum(tl.where(is_before_b, tiles_b, 0), 0)
    first_token = tl.load(starts_ptr + sequence * stride_sb).to(tl.int64)
    num_nodes = (tl.load(starts_ptr + (sequence + 1) * stride_sb) - first_token).to(tl.int32)
    prefix_length = tl.load(prefix_ptr + sequence * stride_pb).to(tl.int32)
    num_rows = num_nodes * GROUP
    num_keys = prefix_length + num_nodes
    split_keys = _blocks_of_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    first_key = split * split_keys
    if first_key >= num_keys:
        return
    end_key = tl.minimum(num_keys, first_key + split_keys)
    row_start = tile * BLOCK_M
    if WINDOW == 0:
        # The nodes of a tile see nothing beyond the last of them.
        last_node = (tl.minimum(num_rows, row_start + BLOCK_M) - 1) // GROUP
        end_key = tl.minimum(end_key, prefix_length + last_node + 1)
    own_k_head_ptr = own_k_ptr
    own_v_head_ptr = own_v_ptr
    visible_ptr = visibility_ptr
    if WINDOW == 1:
        visible_ptr = visibility_ptr + sequence * stride_mb
    if WINDOW == 2:
        own_k_head_ptr = own_k_ptr + first_token * stride_okt + kv_head * stride_okg
        own_v_head_ptr = own_v_ptr + first_token * stride_ovt + kv_head * stride_ovg
    _attend_tile(
        q_ptr + first_token * stride_qt + kv_head * GROUP * stride_qh,
        k_ptr + kv_head * stride_kg,
        v_ptr + kv_head * stride_vg,
        own_k_head_ptr,
        own_v_head_ptr,
        visible_ptr,
        table_ptr + sequence * stride_tb,
        out_ptr,
        partial_ptr,
        lse_ptr,
        scale,
        row_start,
        num_rows,
        first_token,
        kv_head * GROUP,
        num_heads,
        prefix_length,
        first_key,
        end_key,
        num_slots,
        window_width,
        split,
        num_splits,
        stride_qt,
        stride_qh,
        stride_kp,
        stride_ks,
        stride_vp,
        stride_vs,
        stride_okt,
        stride_ovt,
        stride_mi,
        stride_mj,
        stride_tp,
        GROUP,
        HEAD_SIZE,
        PAGE_SIZE,
        WINDOW,
        IS_SPLIT,
        BLOCK_M,
        BLOCK_N,
        BLOCK_E,
        STAGES,
    )


@triton.jit(do_not_specialize=["batch_size", "num_heads", "num_splits"])
def merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    prefix_ptr,
    starts_ptr,
    out_ptr,
    batch_size,
    num_heads,
    num_splits,
    stride_pb,
    stride_sb,
    HEAD_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """Merge the splits in use of some heads of one token; tokens of no sequence become 0."""
    token = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_e = tl.arange(0, BLOCK_E)
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < batch_size
    # The sequence of a token is the number of sequences that end at or before it.
    end_b = tl.load(starts_ptr + (offs_b + 1).to(tl.int64) * stride_sb, mask=mask_b, other=0)
    sequence = tl.sum((mask_b & (end_b <= token)).to(tl.int32), 0)
    is_used = sequence < batch_size
    first_token = tl.load(starts_ptr + sequence.to(tl.int64) * stride_sb, mask=is_used, other=0)
    end_token = tl.load(starts_ptr + (sequence + 1).to(tl.int64) * stride_sb, mask=is_used, other=0)
    prefix_length = tl.load(prefix_ptr + sequence.to(tl.int64) * stride_pb, mask=is_used, other=0)
    num_keys = (prefix_length + end_token - first_token).to(tl.int32)
    split_keys = _blocks_of_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    num_used = tl.where(is_used, tl.cdiv(num_keys, split_keys), 0)
    row_h = token.to(tl.int64) * num_heads + offs_h
    mask_h = offs_h < num_heads
    max_h = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sum_h = tl.zeros([BLOCK_H], tl.float32)
    acc_he = tl.zeros([BLOCK_H, BLOCK_E], tl.float32)
    for first in range(0, num_used, BLOCK_C):
        offs_c = first + tl.arange(0, BLOCK_C)
        mask_hc = mask_h[:, None] & (offs_c < num_used)[None, :]
        row_hc = row_h[:, None] * num_splits + offs_c[None, :]
        lse_hc = tl.load(lse_ptr + row_hc, mask=mask_hc, other=float("-inf"))
        partial_hce = tl.load(
            partial_ptr + row_hc[:, :, None] * HEAD_SIZE + offs_e[None, None, :],
            mask=mask_hc[:, :, None] & (offs_e < HEAD_SIZE)[None, None, :],
            other=0.0,
        )
        new_max_h = tl.maximum(max_h, tl.max(lse_hc, 1))
        shift_h = tl.where(new_max_h == float("-inf"), 0.0, new_max_h)
        weight_hc = tl.exp2(lse_hc - shift_h[:, None])
        decay_h = tl.exp2(max_h - shift_h)
        sum_h = sum_h * decay_h + tl.sum(weight_hc, 1)
        acc_he = acc_he * decay_h[:, None] + tl.sum(weight_hc[:, :, None] * partial_hce, 1)
        max_h = new_max_h
    out_he = acc_he / tl.where(sum_h == 0, 1.0, sum_h)[:, None]
    tl.store(
        out_ptr + row_h[:, None] * HEAD_SIZE + offs_e[None, :],
        out_he.to(out_ptr.dtype.element_ty),
        mask=mask_h[:, None] & (offs_e[None, :] < HEAD_SIZE),
    )
