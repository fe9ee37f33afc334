"""Small model sizes that tests share, and a naive attention that needs no cache."""

import json
from pathlib import Path

import torch

from ddtree_bench.models.dflash import DFlashConfig
from ddtree_bench.models.qwen3 import LayerAttend, Qwen3Config


def target_sizes(**changes: int | bool) -> Qwen3Config:
    """Return a target of three layers with grouped-query attention and an odd vocabulary."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**{**sizes, **changes})


def drafter_sizes(target: Qwen3Config) -> DFlashConfig:
    """Return a drafter of two layers for a target."""
    layers = Qwen3Config(**{**vars(target), "num_hidden_layers": 2})
    return DFlashConfig(
        layers=layers,
        block_size=8,
        mask_token_id=3,
        target_layer_ids=(0, 2),
        num_target_layers=target.num_hidden_layers,
    )


def write_config(folder: Path, config: Qwen3Config | DFlashConfig) -> Path:
    """Write config.json alone, enough for dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def naive_attention(q_QHE: torch.Tensor, k_SGE: torch.Tensor, v_SGE: torch.Tensor, sees_QS: torch.Tensor) -> torch.Tensor:
    """Return softmax(q k / sqrt(E)) v, one head after another."""
    o_QHE = torch.empty_like(q_QHE)
    per_group = q_QHE.shape[1] // k_SGE.shape[1]
    for head in range(q_QHE.shape[1]):
        group = head // per_group
        scores = q_QHE[:, head] @ k_SGE[:, group].T / q_QHE.shape[-1] ** 0.5
        o_QHE[:, head] = scores.masked_fill(~sees_QS, float("-inf")).softmax(-1) @ v_SGE[:, group]
    return o_QHE


def causal(layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
    """One sequence, each token seeing itself and earlier ones."""
    return naive_attention(q_THE, k_TGE, v_TGE, torch.ones(len(q_THE), len(q_THE), dtype=torch.bool).tril())


def block_over_context(context_kv: list[tuple[torch.Tensor, torch.Tensor]]) -> LayerAttend:
    """One block after a context of keys and values, every slot seeing all of both."""

    def attend(layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
        k_SGE, v_SGE = (torch.cat(pair) for pair in zip(context_kv[layer], (k_TGE, v_TGE), strict=True))
        return naive_attention(q_THE, k_SGE, v_SGE, torch.ones(len(q_THE), len(k_SGE), dtype=torch.bool))

    return attend
