"""The drafter: DFlash (arXiv 2602.06036), a few layers that fill a whole block of masked slots in one pass.

A block is [root, MASK × (block_size − 1)]. Slot d sits at position prefix_length + d and predicts the token *at*
slot d. Context is the target's hidden states of the tokens strictly before the root: they are fused once and
enter every layer as keys and values beside the block's own. Embedding and head are the target's.

Shapes: T packed tokens, D hidden size, C target features (len(target_layer_ids) · D), H query heads and
G key/value heads of this rank, E head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import nn

from ddtree_bench.models.layers import DecoderLayer, RMSNorm, RowParallelLinear, rotary_table
from ddtree_bench.models.parallel import Parallel
from ddtree_bench.models.qwen3 import RIGHT_CONFIG, LayerAttend, Qwen3Config, bind_layer, integer_of, names_of, object_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Sizes of a drafter: those of its layers, its block, and where in the target it looks.

    Args:
        layers: sizes of the drafter's own layers; `vocab_size` is the target's.
        block_size: slots it was trained for, the root's included; smaller blocks may be asked for.
        mask_token_id: id whose target embedding fills the slots after the root.
        target_layer_ids: 0-based target layers whose outputs are its features.
        num_target_layers: layers of the target it was trained for.
    """

    layers: Qwen3Config
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def head_dim(self) -> int:
        return self.layers.head_dim

    @property
    def num_features(self) -> int:
        """Width C of the features of one token."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DFlashConfig:
        """Read a drafter checkpoint's config.json.

        Raises:
            ValueError: another architecture, or a field is missing, of a wrong type or out of range.
        """
        if "DFlashDraftModel" not in names_of(raw, "architectures"):
            raise ValueError(
                f"architectures must hold 'DFlashDraftModel'; got {raw.get('architectures')}; "
                "pass a DFlash drafter checkpoint folder"
            )
        special = object_of(raw, "dflash_config")
        missing = [name for name in ("target_layer_ids", "mask_token_id") if special.get(name) is None]
        if missing:
            raise ValueError(f"dflash_config must hold target_layer_ids and mask_token_id; missing {missing}; {RIGHT_CONFIG}")
        layer_ids = special["target_layer_ids"]
        if not isinstance(layer_ids, list) or not layer_ids or not all(type(layer) is int for layer in layer_ids):
            raise ValueError(f"target_layer_ids must be a list of layer numbers; got {layer_ids!r}; {RIGHT_CONFIG}")
        return cls(
            layers=Qwen3Config.sizes_of(raw),
            block_size=integer_of(raw, "block_size", least=2),
            mask_token_id=integer_of(special, "mask_token_id", least=0),
            target_layer_ids=tuple(layer_ids),
            num_target_layers=integer_of(raw, "num_target_layers"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json of a drafter checkpoint says."""
        return {
            **self.layers.to_dict(),
            "architectures": ["DFlashDraftModel"],
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "layer_types": ["full_attention"] * self.layers.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
        }


class DFlashModel(nn.Module):
    """Fusion of the target's features, decoder layers and final norm, this rank's shard."""

    def __init__(self, config: DFlashConfig, parallel: Parallel | None = None) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel or Parallel.single()
        self.feature_range = self.parallel.shard_range(config.num_features, "the drafter's feature width")
        start, stop = self.feature_range
        self.fc = RowParallelLinear(stop - start, config.hidden_size, self.parallel)
        self.hidden_norm = RMSNorm(config.hidden_size, config.layers.rms_norm_eps)
        layers = [config.layers.layer(self.parallel) for _ in range(config.layers.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.num_local_heads = layers[0].self_attn.num_heads
        self.num_local_kv_heads = layers[0].self_attn.num_kv_heads
        self.norm = RMSNorm(config.hidden_size, config.layers.rms_norm_eps)

    def rotary(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotation of each token's position."""
        return rotary_table(positions_T, self.config.head_dim, self.config.layers.rope_theta)

    def project_context(self, features_TC: torch.Tensor) -> torch.Tensor:
        """Return context_TD = norm(fc(features)), one vector a committed token."""
        start, stop = self.feature_range
        return self.hidden_norm(self.fc(features_TC[:, start:stop]))

    def context_kv(self, context_TD: torch.Tensor, positions_T: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each layer, (k_TGE, v_TGE) of committed tokens; keys are normed and rotated."""
        rotary = self.rotary(positions_T)
        return [cast(DecoderLayer, layer).self_attn.keys_values(context_TD, rotary) for layer in self.layers]

    def forward(self, block_embeds_TD: torch.Tensor, positions_T: torch.Tensor, attend: LayerAttend) -> torch.Tensor:
        """Fill blocks of one or several sequences, packed.

        Args:
            block_embeds_TD: target embeddings of root and masks.
            positions_T: prefix length + slot.
            attend: gets the block's own queries, keys and values; adds the context's, and lets every slot of
                a block see every other.

        Returns:
            hidden_TD after the final norm; the target's head turns slot d ≥ 1 into the marginal of depth d.
        """
        x_TD = block_embeds_TD
        rotary = self.rotary(positions_T)
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, rotary, bind_layer(attend, index))
        return self.norm(x_TD)
