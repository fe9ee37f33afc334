"""Plain decoding of many rows at once with a static key/value cache.

All rows stand at the same position: a row whose prompt is longer than the shortest one is fed its prompt's tokens
until its own text begins, so no padding and no mask are needed.

Shapes: B rows, L total length, P prompt length, H query heads, G key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddtree_bench.models.qwen3 import Qwen3Model

GREEDY_FLOOR = 1e-3
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Those that need no plan for each new length; every step has a new length."""


class StaticCache:
    """Keys and values of all layers, [B, L, G, E] each."""

    def __init__(self, model: Qwen3Model, batch: int, length: int) -> None:
        weight = model.embed_tokens.weight
        shape = (batch, length, model.num_local_kv_heads, model.config.head_dim)
        count = model.config.num_hidden_layers
        self.keys = [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(count)]
        self.values = [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(count)]
        self.batch = batch
        self.start = 0
        self.width = 0

    def place(self, start: int, width: int) -> None:
        """Say where the next forward's tokens go: positions [start, start + width) of every row."""
        self.start, self.width = start, width

    def attend(self, layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and attend to everything before and, causally, to the new tokens."""
        end = self.start + self.width
        self.keys[layer][:, self.start : end] = k_TGE.view(self.batch, self.width, *k_TGE.shape[1:])
        self.values[layer][:, self.start : end] = v_TGE.view(self.batch, self.width, *v_TGE.shape[1:])
        if self.start and self.width != 1:
            raise ValueError(f"after the prompt one token a row may be fed; got {self.width}; feed one")
        q = q_THE.view(self.batch, self.width, *q_THE.shape[1:]).transpose(1, 2)
        k, v = (cache[layer][:, :end].transpose(1, 2) for cache in (self.keys, self.values))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=self.width > 1, enable_gqa=k.shape[1] != q.shape[1])
        return o.transpose(1, 2).reshape(q_THE.shape)


def pick(logits_BV: torch.Tensor, temperature_B: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return one token a row: argmax where the temperature is 0, else a sample (Gumbel noise)."""
    noise_BV = torch.empty(logits_BV.shape, device=logits_BV.device).exponential_(generator=generator)
    scaled_BV = logits_BV.float() / temperature_B.clamp_min(GREEDY_FLOOR)[:, None]
    is_greedy_B1 = (temperature_B == 0)[:, None]
    return torch.where(is_greedy_B1, logits_BV.float(), scaled_BV - noise_BV.log()).argmax(-1)


@torch.no_grad()
@sdpa_kernel(BACKENDS)
def continue_rows(
    model: Qwen3Model,
    prompts_BP: torch.Tensor,
    lengths_B: torch.Tensor,
    total_length: int,
    temperature_B: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    """Return tokens_BL: each prompt followed by the target's own text up to `total_length`.

    Args:
        prompts_BP: int64, padded on the right with anything.
        lengths_B: real length of each prompt, at least 1.
        temperature_B: 0 is greedy.
        seed: of the noise.
    """
    batch, device = prompts_BP.shape[0], prompts_BP.device
    generator = torch.Generator(device).manual_seed(seed)
    shortest = int(lengths_B.min())
    tokens_BL = torch.zeros(batch, total_length, dtype=torch.int64, device=device)
    tokens_BL[:, : prompts_BP.shape[1]] = prompts_BP[:, :total_length]
    cache = StaticCache(model, batch, total_length)
    cache.place(0, shortest)
    positions_T = torch.arange(shortest, device=device).repeat(batch)
    hidden_TD, _ = model(tokens_BL[:, :shortest].reshape(-1), positions_T, cache.attend)
    last_BD = hidden_TD.view(batch, shortest, -1)[:, -1]
    for position in range(shortest, total_length):
        chosen_B = pick(model.local_logits(last_BD), temperature_B, generator)
        tokens_BL[:, position] = torch.where(position < lengths_B, tokens_BL[:, position], chosen_B)
        if position + 1 < total_length:
            cache.place(position, 1)
            positions_B = torch.full((batch,), position, device=device)
            last_BD, _ = model(tokens_BL[:, position], positions_B, cache.attend)
    return tokens_BL
