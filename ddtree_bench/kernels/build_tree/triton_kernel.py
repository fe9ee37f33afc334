"""Triton implementation of `build_tree`: best-first search in registers, one program a sequence.

`grow_tree_kernel` selects the nodes one after the other, as the definition reads. The frontier holds one entry for
each selected node: its best child not selected yet, which is the next rank because rows do not increase. A step takes
the least cost (a cost is a negated score; as float64 of at least 0 its bits order like integers, so that integer
minima find it), gives the taken node's parent its next child, and opens an entry for the new node.

Ties. Equal costs go to the lexicographically smaller tuple of ranks, and no tuple is kept: entries compare like
their nodes in the post-order of the tree selected so far. Let i, j be nodes and t_i, t_j their tuples. If neither is
above the other, the entries (t_i, c_i) and (t_j, c_j) first differ where t_i and t_j do, and so does the post-order.
If i is above j, then j is below a child of i of rank less than c_i, so the entry of j is smaller, and post-order puts
j before i. A new node is the last child of its parent p: it takes p's place, and every node from p on moves by one.

Visibility. `first` is the post-order place of the first node of a subtree; it moves when the new place is before it.
Node m is an ancestor of n or n itself where first[m] ≤ last[n] ≤ last[m], `last` being the node's own place, so that
`label_tree_kernel` writes mask and links in parallel from two integers a node.

Letters: B sequences, D draft depths, K candidates of a depth, N room for nodes of a tree.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree_bench.kernels.build_tree.tree_batch import TreeBatch

# A choice is one int32: place of the parent in post-order (10 bits), parent (10), its depth (5), rank of the child (6).
MAX_NODES, MAX_DEPTHS, MAX_CANDIDATES = 1025, 31, 64

_LENGTHS = ["num_depths", "top_k", "max_nodes"]


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Hold what only the speed depends on.

    Args:
        num_warps: warps of a sequence's search; with one, minima need no barrier.
        table_block: entries of the table that are read at a time.
        splits_cost: find the least cost as two 32-bit minima (one instruction each in a warp), not one of 64 bits.
    """

    num_warps: int = 1
    table_block: int = 512
    splits_cost: bool = True


@triton.jit
def _least_cost(cost_bits, SPLITS_COST: tl.constexpr):
    if SPLITS_COST:
        high = (cost_bits >> 32).to(tl.int32)
        low = (cost_bits & 0xFFFFFFFF).to(tl.uint32)
        least_high = tl.min(high, axis=0)
        least_low = tl.min(tl.where(high == least_high, low, 0xFFFFFFFF), axis=0)
        least = (least_high.to(tl.int64) << 32) | least_low.to(tl.int64)
    else:
        least = tl.min(cost_bits, axis=0)
    return least


@triton.jit(do_not_specialize=[*_LENGTHS, "stride_lb", "stride_ld", "stride_tb", "stride_td"])
def grow_tree_kernel(
    logprobs_ptr,
    tokens_ptr,
    node_budget_ptr,
    depth_ptr,
    branching_ptr,
    costs_ptr,
    ranked_tokens_ptr,
    choices_ptr,
    first_ptr,
    last_ptr,
    scores_ptr,
    num_nodes_ptr,
    stride_lb,
    stride_ld,
    stride_lk,
    stride_tb,
    stride_td,
    stride_tk,
    num_depths,
    top_k,
    max_nodes,
    IS_CHAIN: tl.constexpr,
    SPLITS_COST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stride_cd = top_k + 1
    costs_ptr += row * (num_depths + 1) * stride_cd
    ranked_tokens_ptr += row * num_depths * top_k
    choices_ptr += row * max_nodes
    first_ptr += row * max_nodes
    last_ptr += row * max_nodes
    scores_ptr += row * max_nodes
    node_budget = tl.minimum(tl.load(node_budget_ptr + row).to(tl.int64), max_nodes - 1).to(tl.int32)
    depth = tl.minimum(tl.load(depth_ptr + row).to(tl.int64), num_depths).to(tl.int32)
    if IS_CHAIN:
        branching = 1
        root_branching = 1
    else:
        branching = tl.minimum(tl.load(branching_ptr + row).to(tl.int64), top_k).to(tl.int32)
        root_branching = top_k

    # The table without what cannot be selected: costs of the kept candidates of a depth, then infinity. Row D is the
    # one that nodes of depth D look at for children. Reading it all once brings it near before the steps read it value
    # by value.
    offs_k = tl.arange(0, BLOCK_K)
    has_candidates = 0
    for start_d in range(0, num_depths + 1, BLOCK_D):
        offs_d = start_d + tl.arange(0, BLOCK_D)
        mask_dk = (offs_d < depth)[:, None] & (offs_k < top_k)[None, :]
        offs_d64 = offs_d.to(tl.int64)[:, None]
        offs_k64 = offs_k.to(tl.int64)[None, :]
        offs_l = row * stride_lb + offs_d64 * stride_ld + offs_k64 * stride_lk
        offs_t = row * stride_tb + offs_d64 * stride_td + offs_k64 * stride_tk
        logprobs = tl.load(logprobs_ptr + offs_l, mask=mask_dk, other=float("-inf"))
        tokens = tl.load(tokens_ptr + offs_t, mask=mask_dk, other=0)
        is_selectable = logprobs > float("-inf")
        ranks = tl.cumsum(is_selectable.to(tl.int32), axis=1) - 1
        widths = tl.where(offs_d == 0, root_branching, branching)
        is_kept = is_selectable & (ranks < widths[:, None])
        num_kept = tl.sum(is_kept.to(tl.int32), axis=1)
        tl.store(costs_ptr + offs_d[:, None] * stride_cd + ranks, 0.0 - logprobs.to(tl.float64), mask=is_kept)
        tl.store(costs_ptr + offs_d * stride_cd + num_kept, float("inf"), mask=offs_d <= num_depths)
        tl.store(ranked_tokens_ptr + offs_d[:, None] * top_k + ranks, tokens, mask=is_kept)
        tl.debug_barrier()
        is_near = offs_k[None, :] < num_kept[:, None]
        costs = tl.load(costs_ptr + offs_d[:, None] * stride_cd + offs_k[None, :], mask=is_near, other=float("inf"))
        is_finite = tl.reshape(costs < float("inf"), (BLOCK_D * BLOCK_K,))
        has_candidates = tl.maximum(has_candidates, tl.max(is_finite.to(tl.int32), axis=0))

    INFINITE: tl.constexpr = 0x7FF0000000000000
    offs_n = tl.arange(0, BLOCK_N)
    root_entry = tl.load(costs_ptr).to(tl.int64, bitcast=True)
    entries = tl.where(offs_n == 0, root_entry, INFINITE)
    choices = tl.where(offs_n == 0, 0, -1)
    first = tl.where(offs_n == 0, 0, -1)
    costs_n = tl.zeros((BLOCK_N,), dtype=tl.float64)
    place = 0
    node = 1
    num_nodes = tl.where(has_candidates > 0, node_budget + 1, 1)
    least = _least_cost(entries, SPLITS_COST)
    while (node < num_nodes) & (least < INFINITE):
        choice = tl.min(tl.where(entries == least, choices, 0x7FFFFFFF), axis=0)
        cost = least.to(tl.float64, bitcast=True)
        tl.store(choices_ptr + node, choice)
        tl.store(scores_ptr + node, (0.0 - cost).to(tl.float32))
        place = choice >> 21
        row_ptr = costs_ptr + ((choice >> 6) & 31) * stride_cd
        sibling_cost = tl.load(row_ptr + (choice & 63) + 1)
        child_cost = tl.load(row_ptr + stride_cd)

        is_parent = choices == choice
        is_new = offs_n == node
        sibling_entries = (costs_n + sibling_cost).to(tl.int64, bitcast=True)
        child_entry = (cost + child_cost).to(tl.int64, bitcast=True)
        entries = tl.where(is_parent, sibling_entries, tl.where(is_new, child_entry, entries))
        costs_n = tl.where(is_new, cost, costs_n)
        # A rank of 64 spills into the depth, of a node that has no child left to select.
        moved = choices + tl.where(choices >= (place << 21), 1 << 21, 0) + is_parent.to(tl.int32)
        choices = tl.where(is_new, (place << 21) | (node << 11) | ((((choice >> 6) & 31) + 1) << 6), moved)
        first = tl.where(is_new, place, first + (first > place).to(tl.int32))
        least = _least_cost(entries, SPLITS_COST)
        node += 1

    tl.store(num_nodes_ptr + row, node)
    mask_n = offs_n < node
    tl.store(first_ptr + offs_n, first, mask=mask_n)
    # The root of 1,025 nodes stands at place 1,024, which reaches the sign: its bits are read without one.
    tl.store(last_ptr + offs_n, (choices >> 21) & 2047, mask=mask_n)
    # The last node has no entry where it stands beyond the block; nothing came after it, so it is where it was put.
    tl.store(first_ptr + node - 1, place)
    tl.store(last_ptr + node - 1, place)


@triton.jit(do_not_specialize=_LENGTHS)
def label_tree_kernel(
    ranked_tokens_ptr,
    choices_ptr,
    first_ptr,
    last_ptr,
    num_nodes_ptr,
    root_tokens_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    scores_ptr,
    visibility_ptr,
    first_child_ptr,
    next_sibling_ptr,
    num_depths,
    top_k,
    max_nodes,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start_bn = row * max_nodes
    num_nodes = tl.load(num_nodes_ptr + row)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < max_nodes
    is_node = offs_r < num_nodes
    is_draft = is_node & (offs_r > 0)
    choices = tl.load(choices_ptr + start_bn + offs_r, mask=is_draft, other=0)
    last = tl.load(last_ptr + start_bn + offs_r, mask=is_node, other=-1)
    parents = tl.where(is_draft, (choices >> 11) & 1023, -1)
    parent_depths = (choices >> 6) & 31
    tokens = tl.load(ranked_tokens_ptr + (row * num_depths + parent_depths) * top_k + (choices & 63), mask=is_draft, other=0)
    root_token = tl.load(root_tokens_ptr + row)
    tl.store(tokens_ptr + start_bn + offs_r, tl.where(offs_r == 0, root_token, tokens), mask=mask_r)
    tl.store(parents_ptr + start_bn + offs_r, parents, mask=mask_r)
    tl.store(depths_ptr + start_bn + offs_r, tl.where(is_draft, parent_depths + 1, 0), mask=mask_r)
    tl.store(scores_ptr + start_bn + offs_r, 0.0, mask=mask_r & (is_draft == 0))

    NONE: tl.constexpr = 0x7FFFFFFF
    first_child = tl.full((BLOCK_R,), NONE, dtype=tl.int32)
    next_sibling = tl.full((BLOCK_R,), NONE, dtype=tl.int32)
    for start_n in range(0, max_nodes, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < num_nodes
        firsts_n = tl.load(first_ptr + start_bn + offs_n, mask=mask_n, other=NONE)
        lasts_n = tl.load(last_ptr + start_bn + offs_n, mask=mask_n, other=-1)
        choices_n = tl.load(choices_ptr + start_bn + offs_n, mask=mask_n & (offs_n > 0), other=0)
        parents_n = tl.where(mask_n & (offs_n > 0), (choices_n >> 11) & 1023, -2)
        is_visible = is_node[:, None] & (firsts_n[None, :] <= last[:, None]) & (last[:, None] <= lasts_n[None, :])
        offs_rn = (start_bn + offs_r)[:, None] * max_nodes + offs_n[None, :]
        tl.store(visibility_ptr + offs_rn, is_visible, mask=mask_r[:, None] & (offs_n < max_nodes)[None, :])
        is_child = parents_n[None, :] == offs_r[:, None]
        is_sibling = (parents_n[None, :] == parents[:, None]) & (offs_n[None, :] > offs_r[:, None])
        first_child = tl.minimum(first_child, tl.min(tl.where(is_child, offs_n[None, :], NONE), axis=1))
        next_sibling = tl.minimum(next_sibling, tl.min(tl.where(is_sibling, offs_n[None, :], NONE), axis=1))
    tl.store(first_child_ptr + start_bn + offs_r, tl.where(first_child == NONE, -1, first_child), mask=mask_r)
    tl.store(next_sibling_ptr + start_bn + offs_r, tl.where(next_sibling == NONE, -1, next_sibling), mask=mask_r)


def build_tree(
    topk_logprobs_BDK: torch.Tensor,
    topk_tokens_BDK: torch.Tensor,
    root_tokens_B: torch.Tensor,
    *,
    node_budget_B: torch.Tensor,
    depth_B: torch.Tensor,
    branching_B: torch.Tensor,
    max_nodes: int,
    config: BuildConfig | None = None,
) -> TreeBatch:
    """Answer `ddtree_bench.kernels.build_tree.build_tree`; caps beyond the room for nodes are lowered to it."""
    return _build(
        topk_logprobs_BDK, topk_tokens_BDK, root_tokens_B, (node_budget_B, depth_B, branching_B), max_nodes, False, config
    )


def build_chain_batch(
    topk_logprobs_BDK: torch.Tensor,
    topk_tokens_BDK: torch.Tensor,
    root_tokens_B: torch.Tensor,
    *,
    depth_B: torch.Tensor,
    max_nodes: int,
) -> TreeBatch:
    """Answer `ddtree_bench.kernels.build_tree.build_chain_batch`: the tree of branching 1, at the root too."""
    return _build(topk_logprobs_BDK, topk_tokens_BDK, root_tokens_B, (depth_B, depth_B, depth_B), max_nodes, True, None)


def _build(
    logprobs_BDK: torch.Tensor,
    tokens_BDK: torch.Tensor,
    root_tokens_B: torch.Tensor,
    caps: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    max_nodes: int,
    is_chain: bool,
    config: BuildConfig | None,
) -> TreeBatch:
    batch_size, num_depths, top_k = logprobs_BDK.shape
    _check_limits(num_depths, top_k, max_nodes)
    num_entries = max(1, min(max_nodes - 1, num_depths) if is_chain else max_nodes - 1)
    block_n = max(32, triton.next_power_of_2(num_entries))
    block_k = triton.next_power_of_2(max(1, top_k))
    num_warps = max(1, block_n // 256)
    config = config or BuildConfig(num_warps=num_warps, table_block=512 * num_warps)
    batch = _empty_batch(batch_size, max_nodes, logprobs_BDK.device)
    if batch_size == 0:
        return batch
    node_budget_B, depth_B, branching_B = (cap_B.contiguous() for cap_B in caps)
    costs = logprobs_BDK.new_empty((batch_size, num_depths + 1, top_k + 1), dtype=torch.float64)
    ranked_tokens_BDK = torch.empty((batch_size, num_depths, top_k), dtype=torch.int64, device=logprobs_BDK.device)
    choices_BN, first_BN, last_BN = (torch.empty_like(batch.parents_BN) for _ in range(3))
    grow_tree_kernel[(batch_size,)](
        logprobs_BDK,
        tokens_BDK,
        node_budget_B,
        depth_B,
        branching_B,
        costs,
        ranked_tokens_BDK,
        choices_BN,
        first_BN,
        last_BN,
        batch.scores_BN,
        batch.num_nodes_B,
        *logprobs_BDK.stride(),
        *tokens_BDK.stride(),
        num_depths,
        top_k,
        max_nodes,
        IS_CHAIN=is_chain,
        SPLITS_COST=config.splits_cost,
        BLOCK_D=min(triton.next_power_of_2(num_depths + 1), max(1, config.table_block // block_k)),
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        num_warps=config.num_warps,
    )
    block_r = 16
    label_tree_kernel[(batch_size, triton.cdiv(max_nodes, block_r))](
        ranked_tokens_BDK,
        choices_BN,
        first_BN,
        last_BN,
        batch.num_nodes_B,
        root_tokens_B.contiguous(),
        batch.tokens_BN,
        batch.parents_BN,
        batch.depths_BN,
        batch.scores_BN,
        batch.visibility_BNN,
        batch.first_child_BN,
        batch.next_sibling_BN,
        num_depths,
        top_k,
        max_nodes,
        BLOCK_R=block_r,
        BLOCK_N=128,
        num_warps=4,
    )
    return batch


def _check_limits(num_depths: int, top_k: int, max_nodes: int) -> None:
    for name, value, limit in (
        ("max_nodes", max_nodes, MAX_NODES),
        ("the number of draft depths", num_depths, MAX_DEPTHS),
        ("the number of candidates of a depth", top_k, MAX_CANDIDATES),
    ):
        if value > limit:
            raise ValueError(f"{name} must be at most {limit} on a GPU, got {value}; lower it")


def _empty_batch(batch_size: int, max_nodes: int, device: torch.device) -> TreeBatch:
    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((batch_size, *shape), dtype=dtype, device=device)

    return TreeBatch(
        tokens_BN=room(torch.int64, max_nodes),
        parents_BN=room(torch.int32, max_nodes),
        depths_BN=room(torch.int32, max_nodes),
        scores_BN=room(torch.float32, max_nodes),
        num_nodes_B=room(torch.int32),
        visibility_BNN=room(torch.bool, max_nodes, max_nodes),
        first_child_BN=room(torch.int32, max_nodes),
        next_sibling_BN=room(torch.int32, max_nodes),
    )
