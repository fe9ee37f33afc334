"""Shapes and inputs of `block_attention`."""

from dataclasses import dataclass

import torch

from ddtree_bench.kernels.paged_cases import make_paged_cache, starts_of


@dataclass(frozen=True, kw_only=True)
class BlockAttentionCase:
    """Name one shape: a context length and a block length for each sequence."""

    name: str
    context_lengths: tuple[int, ...]
    block_lengths: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    page_size: int = 4

    def make_inputs(self, seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
        """Draw the arguments of `block_attention`; slots that nothing was written to are NaN."""
        generator = torch.Generator().manual_seed(seed)
        cache = make_paged_cache(
            self.context_lengths,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            generator=generator,
            dtype=dtype,
        )

        def rows(num_heads: int) -> torch.Tensor:
            return torch.randn(sum(self.block_lengths), num_heads, self.head_size, generator=generator).to(dtype)

        inputs = {
            "q_THE": rows(self.num_heads),
            "k_TGE": rows(self.num_kv_heads),
            "v_TGE": rows(self.num_kv_heads),
            "k_cache_PSGE": cache.k_cache_PSGE,
            "v_cache_PSGE": cache.v_cache_PSGE,
            "page_table_BP": cache.page_table_BP,
            "context_lengths_B": torch.tensor(self.context_lengths, dtype=torch.int32),
            "query_starts_B1": starts_of(self.block_lengths),
        }
        return {name: tensor.to(device) for name, tensor in inputs.items()} | {"scale": self.head_size**-0.5}


TEST_CASES = (
    BlockAttentionCase(name="one", context_lengths=(0,), block_lengths=(1,)),
    BlockAttentionCase(name="odd", context_lengths=(7, 0, 12), block_lengths=(5, 3, 16)),
    BlockAttentionCase(name="no-block", context_lengths=(7, 4), block_lengths=(0, 3)),
    BlockAttentionCase(name="page-of-1", context_lengths=(6,), block_lengths=(7,), page_size=1, num_kv_heads=4),
    BlockAttentionCase(
        name="one-kv-head", context_lengths=(31, 2), block_lengths=(8, 8), num_heads=5, num_kv_heads=1, head_size=24
    ),
)

BENCH_CASES = tuple(
    BlockAttentionCase(
        name=f"qwen3-8b-block-16-batch-{batch}-context-{context}",
        context_lengths=(context,) * batch,
        block_lengths=(16,) * batch,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        page_size=16,
    )
    for batch in (1, 8, 32)
    for context in (2048, 16384, 65536)
)
