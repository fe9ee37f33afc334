"""Building blocks that target and drafter share, sharded for tensor parallelism.

Every projection into heads or FFN is column-parallel (output rows split over ranks), every projection back is
row-parallel (input columns split, results summed), so that a layer needs two all-reduces.

Shapes: T packed tokens, D hidden size, H query heads of this rank, G key/value heads of this rank, E head size,
M query and key heads of this rank (H + G), F rotary frequencies (E / 2), I FFN size of this rank, V vocabulary shard of
this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from ddtree_bench.models.parallel import Parallel

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(q_THE, k_TGE, v_TGE) -> o_THE, for one layer. Keys are rotated; scaling by E ** -0.5 is the callee's."""

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos_TF, sin_TF), float32."""


def empty_weight(*shape: int) -> nn.Parameter:
    """Return an uninitialised parameter that the loader or the trainer fills."""
    return nn.Parameter(torch.empty(*shape))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis; the mean and the division in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm of x's last axis; `weight` is any shape that spreads over x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


def rotary_table(positions_T: torch.Tensor, head_dim: int, theta: float) -> Rotary:
    """Return cos and sin of position · theta^(−2f / E) for each frequency f.

    Args:
        positions_T: absolute positions, any integer dtype.

    Returns:
        cos_TF, sin_TF: float32.
    """
    exponents_F = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32) / head_dim
    angles_TF = positions_T.float()[:, None] * torch.pow(theta, -exponents_F)[None, :]
    return angles_TF.cos(), angles_TF.sin()


def apply_rotary(x_THE: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate each pair (x[f], x[f + E/2]) by its angle; in float32, returned in x's dtype."""
    cos_T1F, sin_T1F = (table_TF.unsqueeze(1) for table_TF in rotary)
    first, second = x_THE.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F), dim=-1)
    return rotated.to(x_THE.dtype)


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ where this rank holds some rows of W; the output is this rank's part."""

    def __init__(self, in_features: int, local_out_features: int) -> None:
        super().__init__()
        self.weight = empty_weight(local_out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ where this rank holds some columns of W and the matching part of x; the output is whole."""

    def __init__(self, local_in_features: int, out_features: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = empty_weight(out_features, local_in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_reduce(functional.linear(x, self.weight))


class VocabParallelEmbedding(nn.Module):
    """Token embedding, and the output head over the same kind of shard.

    The vocabulary is padded to a multiple of the ranks; padded ids are never looked up and their logits are −inf.
    """

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.vocab_size = vocab_size
        self.local_size = -(-vocab_size // parallel.world_size)
        self.vocab_offset = parallel.rank * self.local_size
        self.weight = empty_weight(self.local_size, hidden_size)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return the whole embeddings x_TD of global token ids."""
        if self.parallel.world_size == 1:
            return functional.embedding(tokens_T, self.weight)
        local_T = tokens_T - self.vocab_offset
        is_here_T = (local_T >= 0) & (local_T < self.local_size)
        x_TD = functional.embedding(torch.where(is_here_T, local_T, 0), self.weight)
        return self.parallel.all_reduce(torch.where(is_here_T[:, None], x_TD, 0))

    def local_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return logits_TV of this rank's ids, the first of which is `vocab_offset`."""
        logits_TV = functional.linear(hidden_TD, self.weight)
        num_real = max(0, min(self.local_size, self.vocab_size - self.vocab_offset))
        if num_real < self.local_size:
            logits_TV[:, num_real:] = float("-inf")
        return logits_TV


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)); gate and up are one matrix, gate's rows first."""

    def __init__(self, hidden_size: int, intermediate_size: int, parallel: Parallel) -> None:
        super().__init__()
        start, stop = parallel.shard_range(intermediate_size, "intermediate_size")
        self.gate_up_proj = ColumnParallelLinear(hidden_size, 2 * (stop - start))
        self.down_proj = RowParallelLinear(stop - start, hidden_size, parallel)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate_TI) * up_TI)


class Attention(nn.Module):
    """Projections, QK-norm and rotation around an `attend` that the caller supplies.

    Query, key and value projections are one matrix, rows in that order.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, parallel: Parallel
    ) -> None:
        super().__init__()
        head_start, head_stop = parallel.shard_range(num_heads, "num_attention_heads")
        kv_start, kv_stop = parallel.kv_head_range(num_kv_heads)
        self.num_heads = head_stop - head_start
        self.num_kv_heads = kv_stop - kv_start
        self.head_dim = head_dim
        self.qkv_proj = ColumnParallelLinear(hidden_size, (self.num_heads + 2 * self.num_kv_heads) * head_dim)
        self.o_proj = RowParallelLinear(self.num_heads * head_dim, hidden_size, parallel)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)

    def forward(self, x_TD: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads_TNE = self.qkv_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        qk_TME, v_TGE = heads_TNE.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        # Queries and keys are normed and rotated together: over few tokens the number of operations is what costs.
        weight_ME = torch.cat((self.q_norm.weight.expand(num_heads, -1), self.k_norm.weight.expand(num_kv_heads, -1)))
        rotated_TME = apply_rotary(rms_norm(qk_TME, weight_ME, self.q_norm.eps), rotary)
        q_THE, k_TGE = rotated_TME.split([num_heads, num_kv_heads], dim=1)
        return self.o_proj(attend(q_THE, k_TGE, v_TGE).flatten(1))

    def keys_values(self, x_TD: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normed and rotated keys, and values, of tokens that ask nothing themselves."""
        weight = self.qkv_proj.weight[self.num_heads * self.head_dim :]
        heads_TNE = functional.linear(x_TD, weight).unflatten(-1, (-1, self.head_dim))
        k_TGE, v_TGE = heads_TNE.chunk(2, dim=1)
        return apply_rotary(self.k_norm(k_TGE), rotary), v_TGE


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then + MLP(norm(·)). Names of parts follow Hugging Face's Qwen3."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        eps: float,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(hidden_size, num_heads, num_kv_heads, head_dim, eps, parallel)
        self.mlp = GatedMLP(hidden_size, intermediate_size, parallel)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    def forward(self, x_TD: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotary, attend)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))
