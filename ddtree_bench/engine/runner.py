"""One rank's models and caches, and the forward passes over packed batches.

Owns the `attend` callbacks that join the models to the cache; what to run and what to do with the result is left to
`prefill` and `round`.

Letters: B sequences, T packed tokens, N widest window, D hidden size, C target features, V vocabulary shard,
H query heads, G key/value heads, E head size, L layers, P pages, S slots of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree_bench.engine.kv_caches import CacheShape, KVCaches
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.kernels.block_attention import block_attention
from ddtree_bench.kernels.tree_attention import tree_attention
from ddtree_bench.kernels.write_kv import write_kv
from ddtree_bench.models.dflash import DFlashModel
from ddtree_bench.models.parallel import Parallel
from ddtree_bench.models.qwen3 import Qwen3Model
from ddtree_bench.models.weights import bundled_drafter_of, load_drafter, load_target, resolve_model

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Packed tokens that are appended behind the prefixes of a batch.

    Args:
        tokens_T: int64.
        positions_T: int64, absolute.
        slots_T: int64, where the target's keys and values go.
        page_table_BP: int32.
        prefix_lengths_B: int64, cached tokens before the window.
        query_starts_B1: int64.
        visibility_BNN: bool, ancestor or self; None for causal.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    page_table_BP: torch.Tensor
    prefix_lengths_B: torch.Tensor
    query_starts_B1: torch.Tensor
    visibility_BNN: torch.Tensor | None = None


class Runner:
    """Load the models of one rank and run them.

    Args:
        settings: what to load and in which precision.
        parallel: this rank's place.

    Raises:
        ValueError: the checkpoints do not fit each other, the setting or the number of ranks.
    """

    def __init__(self, settings: EngineSettings, parallel: Parallel) -> None:
        self.parallel = parallel
        self.setting = settings.tree.canonical()
        self.page_size = settings.page_size
        self.dtype = TORCH_DTYPES[settings.dtype]
        self.device = _device(settings.device, parallel.rank)
        self.model_folder = resolve_model(settings.model)
        how = (parallel, self.dtype, self.device, settings.load_format, settings.seed)
        self.target: Qwen3Model = load_target(self.model_folder, *how)
        self.drafter: DFlashModel | None = None
        if self.setting.num_draft_tokens > 0:
            folder = resolve_model(settings.drafter) if settings.drafter else bundled_drafter_of(settings.model)
            if folder is None:
                raise ValueError(
                    f"mode {self.setting.mode!r} must have a drafter; model {settings.model!r} ships none and none was given; "
                    "pass a DFlash checkpoint folder as the drafter or use mode 'plain'"
                )
            self.drafter = load_drafter(folder, *how, self.target.config)
            self._check_block_size(self.drafter)
        self.target_caches: KVCaches | None = None
        self.drafter_caches: KVCaches | None = None

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab_size

    @property
    def vocab_offset(self) -> int:
        return self.target.vocab_offset

    @property
    def num_local_tokens(self) -> int:
        """Vocabulary ids of this rank's shard, padding included."""
        return self.target.lm_head.local_size

    def cache_bytes_per_token(self) -> int:
        """Return the cache bytes of one token on this rank, both models."""
        return sum(shape.bytes_per_token(self.dtype) for shape in self._cache_shapes())

    def allocate_caches(self, num_pages: int) -> None:
        """Make the caches; must be called once before anything runs."""
        caches = [
            KVCaches(shape, num_pages=num_pages, page_size=self.page_size, dtype=self.dtype, device=self.device)
            for shape in self._cache_shapes()
        ]
        self.target_caches = caches[0]
        self.drafter_caches = caches[1] if self.drafter is not None else None

    def run_target(self, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target over a window and write its keys and values.

        Returns:
            hidden_TD and the drafter's features_TC (C = 0 without a drafter).
        """
        caches = self.target_caches
        assert caches is not None, "caches are allocated before the first step"
        scale = self.target.config.head_dim**-0.5

        def attend(layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
            k_PSGE, v_PSGE = caches.k_caches[layer], caches.v_caches[layer]
            write_kv(k_TGE, v_TGE, k_PSGE, v_PSGE, window.slots_T)
            return tree_attention(
                q_THE,
                k_PSGE,
                v_PSGE,
                window.page_table_BP,
                window.prefix_lengths_B,
                window.query_starts_B1,
                window.visibility_BNN,
                scale=scale,
            )

        capture = self.drafter.config.target_layer_ids if self.drafter is not None else ()
        return self.target(window.tokens_T, window.positions_T, attend, capture)

    def append_context(self, features_TC: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write the drafter's keys and values of committed tokens; nothing to do without a drafter."""
        if self.drafter is None:
            return
        caches = self.drafter_caches
        assert caches is not None, "caches are allocated before the first step"
        context_TD = self.drafter.project_context(features_TC)
        for layer, (k_TGE, v_TGE) in enumerate(self.drafter.context_kv(context_TD, positions_T)):
            write_kv(k_TGE, v_TGE, caches.k_caches[layer], caches.v_caches[layer], slots_T)

    def draft_logits(
        self, root_tokens_B: torch.Tensor, prefix_lengths_B: torch.Tensor, page_table_BP: torch.Tensor
    ) -> torch.Tensor:
        """Fill one block a sequence and return the drafter's logits of the depths that the setting uses.

        Returns:
            logits_RV: float32 shard, R = B · depth, depth 1 of a sequence first.
        """
        drafter, caches, block_size = self.drafter, self.drafter_caches, self.setting.block_size
        assert drafter is not None, "drafting needs a drafter"
        assert caches is not None, "caches are allocated before the first step"
        batch_size = len(root_tokens_B)
        tokens_BN = root_tokens_B.new_full((batch_size, block_size), drafter.config.mask_token_id)
        tokens_BN[:, 0] = root_tokens_B
        slots_N = torch.arange(block_size, device=self.device)
        positions_T = (prefix_lengths_B[:, None] + slots_N).flatten()
        query_starts_B1 = torch.arange(batch_size + 1, device=self.device) * block_size
        scale = drafter.config.head_dim**-0.5

        def attend(layer: int, q_THE: torch.Tensor, k_TGE: torch.Tensor, v_TGE: torch.Tensor) -> torch.Tensor:
            return block_attention(
                q_THE,
                k_TGE,
                v_TGE,
                caches.k_caches[layer],
                caches.v_caches[layer],
                page_table_BP,
                prefix_lengths_B,
                query_starts_B1,
                scale=scale,
            )

        hidden_TD = drafter(self.target.embed(tokens_BN.flatten()), positions_T, attend)
        hidden_BND = hidden_TD.view(batch_size, block_size, -1)
        return self.logits(hidden_BND[:, 1 : self.setting.max_depth + 1].flatten(0, 1))

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits_RV of this rank's shard in float32."""
        return self.target.local_logits(hidden_RD).float()

    def _cache_shapes(self) -> list[CacheShape]:
        target = CacheShape(
            num_layers=self.target.config.num_hidden_layers,
            num_kv_heads=self.target.num_local_kv_heads,
            head_size=self.target.config.head_dim,
        )
        if self.drafter is None:
            return [target]
        drafter = CacheShape(
            num_layers=self.drafter.config.layers.num_hidden_layers,
            num_kv_heads=self.drafter.num_local_kv_heads,
            head_size=self.drafter.config.head_dim,
        )
        return [target, drafter]

    def _check_block_size(self, drafter: DFlashModel) -> None:
        if self.setting.block_size > drafter.config.block_size:
            raise ValueError(
                f"block_size must be at most the drafter's {drafter.config.block_size}; given {self.setting.block_size}; "
                "lower it or pass a drafter trained for larger blocks"
            )


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or rank >= torch.cuda.device_count():
        raise ValueError(
            f"device 'cuda' must have a GPU for rank {rank}; this machine shows {torch.cuda.device_count()}; "
            "lower tensor_parallel or use device 'cpu'"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
