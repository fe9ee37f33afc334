"""The target: a dense Qwen3 decoder over packed tokens.

It owns the arithmetic between tokens and logits. It owns no cache and no mask: the caller's `attend` does that.

Shapes: T packed tokens, D hidden size, C concatenated features (len(capture_layer_ids) · D), H query heads and
G key/value heads of this rank, E head size, V vocabulary shard of this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ddtree_bench.models.layers import DecoderLayer, RMSNorm, VocabParallelEmbedding, rotary_table
from ddtree_bench.models.parallel import Parallel

LayerAttend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer_index, q_THE, k_TGE, v_TGE) -> o_THE."""


def rope_theta_of(raw: dict[str, Any]) -> float:
    """Read rope_theta from a config.json of either Hugging Face generation; refuse every scaling.

    Raises:
        ValueError: the config asks for a rotary scaling.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_scaling must be none; got {kind!r}; use a checkpoint without rotary scaling "
            "or remove rope_scaling from its config.json and stay inside its trained context"
        )
    return float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Raise ValueError on a field that would change the arithmetic in a way not implemented here."""
    wanted = {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    for name, value in wanted.items():
        if raw.get(name, value) != value:
            raise ValueError(f"{name} must be {value}; got {raw[name]}; use a checkpoint with {name}={value}")
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"layer_types must all be 'full_attention'; got {sorted(kinds)}; use a dense checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes of a dense Qwen3 model, under their Hugging Face names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2_048
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Qwen3Config:
        """Read a checkpoint's config.json.

        Raises:
            ValueError: another architecture, or a field that is not supported.
        """
        if raw.get("model_type") != "qwen3":
            raise ValueError(f"model_type must be 'qwen3'; got {raw.get('model_type')!r}; pass a dense Qwen3 checkpoint folder")
        refuse_unsupported(raw)
        num_heads = raw["num_attention_heads"]
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=num_heads,
            num_key_value_heads=raw.get("num_key_value_heads", num_heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
            intermediate_size=raw["intermediate_size"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta_of(raw),
            max_position_embeddings=raw.get("max_position_embeddings", 32_768),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json of a checkpoint says, readable by Hugging Face, SGLang and vLLM."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **dataclasses.asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rope_scaling": None,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }

    def layer(self, parallel: Parallel) -> DecoderLayer:
        """Return one decoder layer of these sizes, this rank's shard, uninitialised."""
        return DecoderLayer(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            eps=self.rms_norm_eps,
            parallel=parallel,
        )


class Qwen3Model(nn.Module):
    """Embedding, decoder layers, final norm and head, this rank's shard."""

    def __init__(self, config: Qwen3Config, parallel: Parallel | None = None) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel or Parallel.single()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, self.parallel)
        layers = [config.layer(self.parallel) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.num_local_heads = layers[0].self_attn.num_heads
        self.num_local_kv_heads = layers[0].self_attn.num_kv_heads
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, self.parallel)
        self.vocab_offset = self.embed_tokens.vocab_offset

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return x_TD, the embeddings of global token ids."""
        return self.embed_tokens(tokens_T)

    def local_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return logits_TV over this rank's ids, the first of which is `vocab_offset`; padded ids are −inf."""
        return self.lm_head.local_logits(hidden_TD)

    def rotary(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotation of each token's position."""
        return rotary_table(positions_T, self.config.head_dim, self.config.rope_theta)

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: LayerAttend,
        capture_layer_ids: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers over packed tokens.

        Args:
            tokens_T: global token ids, int64 or int32.
            positions_T: absolute position of each token.
            attend: called once a layer, in layer order.
            capture_layer_ids: 0-based layers whose outputs (before the final norm) are the drafter's features.

        Returns:
            hidden_TD after the final norm, and features_TC in the given order (C = 0 when none are asked for).
        """
        x_TD = self.embed(tokens_T)
        rotary = self.rotary(positions_T)
        captured: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, rotary, bind_layer(attend, index))
            if index in capture_layer_ids:
                captured[index] = x_TD
        if not capture_layer_ids:
            return self.norm(x_TD), x_TD[:, :0]
        return self.norm(x_TD), torch.cat([captured[index] for index in capture_layer_ids], dim=-1)


def bind_layer(attend: LayerAttend, index: int) -> Callable[..., torch.Tensor]:
    """Return attend with its layer index filled in."""

    def attend_layer(q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        return attend(index, q_THE, k_TGE, v_TGE)

    return attend_layer
