"""The target: a dense Qwen3 decoder over packed tokens.

It owns the arithmetic between tokens and logits. It owns no cache and no mask: the caller's `attend` does that.

Shapes: T packed tokens, D hidden size, C concatenated features (len(capture_layer_ids) · D), H query heads and
G key/value heads of this rank, E head size, V vocabulary shard of this rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ddtree_bench.models.layers import DecoderLayer, RMSNorm, VocabParallelEmbedding, rotary_table
from ddtree_bench.models.parallel import Parallel

ARCHITECTURE = "Qwen3ForCausalLM"
LayerAttend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer_index, q_THE, k_TGE, v_TGE) -> o_THE."""


RIGHT_CONFIG = "take config.json from the same release as the weights"


def integer_of(raw: dict[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """Return an integer field of a config.json.

    Raises:
        ValueError: it is missing without a default, is no integer, or is below `least`; names the field.
    """
    value = raw.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        given = repr(value) if name in raw or default is not None else "nothing"
        raise ValueError(f"{name} must be an integer of at least {least}; got {given}; {RIGHT_CONFIG}")
    return value


def positive_number_of(raw: dict[str, Any], name: str, default: float) -> float:
    """Return a positive, finite number of a config.json; ValueError names the field."""
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number; got {value!r}; {RIGHT_CONFIG}")
    return float(value)


def flag_of(raw: dict[str, Any], name: str, default: bool) -> bool:
    """Return a true or false of a config.json; ValueError names the field."""
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}; {RIGHT_CONFIG}")
    return value


def object_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of a config.json, empty where it is null or missing; ValueError names the field."""
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be an object; got {value!r}; {RIGHT_CONFIG}")
    return value or {}


def names_of(raw: dict[str, Any], name: str) -> list[str]:
    """Return a list of names of a config.json, empty where it is null or missing; ValueError names the field."""
    value = raw.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ValueError(f"{name} must be a list of names; got {value!r}; {RIGHT_CONFIG}")
    return value or []


def rope_theta_of(raw: dict[str, Any]) -> float:
    """Read rope_theta from a config.json of either Hugging Face generation; refuse every scaling.

    Raises:
        ValueError: the config asks for a rotary scaling, or rope_theta is no positive number.
    """
    rope = object_of(raw, "rope_parameters") or object_of(raw, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_scaling must be none; got {kind!r}; use a checkpoint without rotary scaling "
            "or remove rope_scaling from its config.json and stay inside its trained context"
        )
    return positive_number_of(rope if "rope_theta" in rope else raw, "rope_theta", 10_000.0)


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Raise ValueError on a field that would change the arithmetic in a way not implemented here."""
    wanted = {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    for name, value in wanted.items():
        if raw.get(name, value) != value:
            raise ValueError(f"{name} must be {value}; got {raw[name]}; use a checkpoint with {name}={value}")
    if raw.get("quantization_config"):
        raise ValueError(
            f"quantization_config must be none; got {raw['quantization_config']!r}; "
            "use the checkpoint's release in bfloat16, float16 or float32"
        )
    kinds = set(names_of(raw, "layer_types"))
    if not kinds <= {"full_attention"}:
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
            ValueError: another architecture, or a field that is not supported, missing, of a wrong type or out of range.
        """
        given = names_of(raw, "architectures")
        if given and ARCHITECTURE not in given:
            raise ValueError(f"architectures must hold {ARCHITECTURE!r}; got {given}; pass a dense Qwen3 checkpoint folder")
        return cls.sizes_of(raw)

    @classmethod
    def sizes_of(cls, raw: dict[str, Any]) -> Qwen3Config:
        """Read the sizes alone, as from_dict does, whatever `architectures` holds: a drafter's layers are Qwen3's too."""
        if raw.get("model_type") != "qwen3":
            raise ValueError(f"model_type must be 'qwen3'; got {raw.get('model_type')!r}; pass a dense Qwen3 checkpoint folder")
        refuse_unsupported(raw)
        derived = {name for name in ("num_key_value_heads", "head_dim") if raw.get(name) is None}  # null: from the others
        raw = {name: value for name, value in raw.items() if name not in derived}
        hidden_size, num_heads = integer_of(raw, "hidden_size"), integer_of(raw, "num_attention_heads")
        num_kv_heads = integer_of(raw, "num_key_value_heads", num_heads)
        head_dim = integer_of(raw, "head_dim", hidden_size // num_heads, least=2)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_key_value_heads must divide {num_heads} attention heads; got {num_kv_heads}; {RIGHT_CONFIG}")
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, it is rotated in pairs; got {head_dim}; {RIGHT_CONFIG}")
        return cls(
            vocab_size=integer_of(raw, "vocab_size"),
            hidden_size=hidden_size,
            num_hidden_layers=integer_of(raw, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=integer_of(raw, "intermediate_size"),
            rms_norm_eps=positive_number_of(raw, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta_of(raw),
            max_position_embeddings=integer_of(raw, "max_position_embeddings", 32_768),
            tie_word_embeddings=flag_of(raw, "tie_word_embeddings", False),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json of a checkpoint says, readable by Hugging Face, SGLang and vLLM."""
        return {
            "architectures": [ARCHITECTURE],
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
