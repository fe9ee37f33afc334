"""`walk_tree` in Triton: one program of one warp walks one tree.

All nodes lie in registers. A node is matched when its token is the target's choice at its parent; a step takes the
lowest matched child of the current node, which is one reduction inside the warp, so that no step touches memory.

Letters: B sequences, N room for nodes of a tree.
"""

import torch
import triton
import triton.language as tl

from ddtree_bench.kernels.walk_tree.walk_batch import WalkBatch

_LENGTHS = ["num_columns", "stride_tb", "stride_tn", "stride_pb", "stride_pn", "stride_gb", "stride_gn"]


@triton.jit(do_not_specialize=_LENGTHS)
def _walk_kernel(
    tokens_ptr,
    parents_ptr,
    num_nodes_ptr,
    target_ptr,
    path_ptr,
    num_accepted_ptr,
    bonus_ptr,
    num_columns,
    stride_tb,
    stride_tn,
    stride_pb,
    stride_pn,
    stride_gb,
    stride_gn,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_nodes = tl.minimum(tl.load(num_nodes_ptr + row), num_columns).to(tl.int32)
    offs_n = tl.arange(0, BLOCK_N)
    wide_n = offs_n.to(tl.int64)
    is_draft_n = (offs_n > 0) & (offs_n < num_nodes)
    tokens_n = tl.load(tokens_ptr + row * stride_tb + wide_n * stride_tn, mask=is_draft_n, other=0)
    parents_n = tl.load(parents_ptr + row * stride_pb + wide_n * stride_pn, mask=is_draft_n, other=-1)
    has_parent_n = is_draft_n & (parents_n >= 0) & (parents_n < num_columns)
    choices_n = tl.load(target_ptr + row * stride_gb + parents_n.to(tl.int64) * stride_gn, mask=has_parent_n, other=0)
    matched_parents_n = tl.where(has_parent_n & (tokens_n == choices_n), parents_n, -2)

    path_n = tl.where(offs_n == 0, 0, -1)
    current = tl.min(offs_n, axis=0)
    following = tl.min(tl.where(matched_parents_n == current, offs_n, BLOCK_N), axis=0)
    num_accepted = current
    while following < BLOCK_N:
        num_accepted += 1
        current = following
        path_n = tl.where(offs_n == num_accepted, current, path_n)
        following = tl.min(tl.where((matched_parents_n == current) & (offs_n > current), offs_n, BLOCK_N), axis=0)

    tl.store(path_ptr + row * num_columns + wide_n, path_n, mask=offs_n < num_columns)
    tl.store(num_accepted_ptr + row, num_accepted)
    tl.store(bonus_ptr + row, tl.load(target_ptr + row * stride_gb + current.to(tl.int64) * stride_gn))


def walk_tree(
    tokens_BN: torch.Tensor, parents_BN: torch.Tensor, num_nodes_B: torch.Tensor, target_tokens_BN: torch.Tensor
) -> WalkBatch:
    """Answer `ddtree_bench.kernels.walk_tree.walk_tree`; parents come before children, as in every tree."""
    batch_size, num_columns = tokens_BN.shape
    path_BN = torch.empty(batch_size, num_columns, dtype=torch.int32, device=tokens_BN.device)
    num_accepted_B = torch.empty(batch_size, dtype=torch.int32, device=tokens_BN.device)
    bonus_tokens_B = torch.empty(batch_size, dtype=torch.int64, device=tokens_BN.device)
    if batch_size:
        _walk_kernel[(batch_size,)](
            tokens_BN,
            parents_BN,
            num_nodes_B.contiguous(),
            target_tokens_BN,
            path_BN,
            num_accepted_B,
            bonus_tokens_B,
            num_columns,
            *tokens_BN.stride(),
            *parents_BN.stride(),
            *target_tokens_BN.stride(),
            BLOCK_N=triton.next_power_of_2(num_columns),
            num_warps=1 if num_columns <= 512 else 4,
        )
    return WalkBatch(path_BN=path_BN, num_accepted_B=num_accepted_B, bonus_tokens_B=bonus_tokens_B)
