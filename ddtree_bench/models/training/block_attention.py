"""Attention of many drafter blocks over few sequences: each block sees the tokens before its root, and itself.

The two kinds of key are scored apart and share one softmax, so the blocks of a sequence share its context's keys.

Shapes: B sequences, L their length, A blocks of a sequence, J slots of a block, H query heads, G key/value heads,
E head size, T = B · A · J packed slots.
"""

from __future__ import annotations

import torch

from ddtree_bench.models.qwen3 import LayerAttend


def split_heads(x_TGE: torch.Tensor, shape: tuple[int, ...], num_heads: int) -> torch.Tensor:
    """Return x with axis T unfolded to `shape`, heads second, key/value heads repeated up to `num_heads`."""
    x = x_TGE.unflatten(0, shape).movedim(-2, 1)
    return x.repeat_interleave(num_heads // x.shape[1], dim=1) if x.shape[1] != num_heads else x


def block_attend(
    context_kv: list[tuple[torch.Tensor, torch.Tensor]],
    roots_BA: torch.Tensor,
    sizes_BA: torch.Tensor,
    length: int,
    num_slots: int,
) -> LayerAttend:
    """Return the drafter's attention for packed blocks.

    Args:
        context_kv: for each layer, (k, v) of all B · L context tokens.
        roots_BA: position of each block's root; context strictly before it is seen.
        sizes_BA: slots in use of each block.
    """
    batch, num_blocks = roots_BA.shape
    device = roots_BA.device
    sees_context = torch.arange(length, device=device) < roots_BA[..., None]
    sees_slot = torch.arange(num_slots, device=device) < sizes_BA[..., None]
    hidden = ~torch.cat([sees_context, sees_slot], dim=-1)[:, None, :, None, :]

    def attend(layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        num_heads, head_dim = q_THE.shape[1:]
        blocks = (batch, num_blocks, num_slots)
        q, k_own, v_own = (split_heads(x, blocks, num_heads) for x in (q_THE, k_TGE, v_TGE))
        k_context, v_context = (split_heads(x, (batch, length), num_heads) for x in context_kv[layer])
        q = q * head_dim**-0.5
        to_context = (q.flatten(2, 3) @ k_context.mT).unflatten(2, (num_blocks, num_slots))
        scores = torch.cat([to_context, q @ k_own.mT], dim=-1).masked_fill(hidden, float("-inf"))
        share = scores.softmax(-1, dtype=torch.float32).to(v_own.dtype)
        from_context = (share[..., :length].flatten(2, 3) @ v_context).unflatten(2, (num_blocks, num_slots))
        o = from_context + share[..., length:] @ v_own
        return o.movedim(1, -2).reshape(q_THE.shape)

    return attend
