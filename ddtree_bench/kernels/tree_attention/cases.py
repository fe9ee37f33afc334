"""Shapes and inputs of `tree_attention`.

Letters: B sequences, N widest window.
"""

from dataclasses import dataclass

import torch

from ddtree_bench.kernels.paged_cases import make_paged_cache, starts_of


@dataclass(frozen=True, kw_only=True)
class TreeAttentionCase:
    """Name one shape; `window` says what the nodes of a window see: "tree", "chain" (a mask) or "causal" (none)."""

    name: str
    prefix_lengths: tuple[int, ...]
    num_nodes: tuple[int, ...]
    window: str = "tree"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    page_size: int = 4

    def make_inputs(self, seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
        """Draw the arguments of `tree_attention`; slots that nothing was written to are NaN."""
        generator = torch.Generator().manual_seed(seed)
        lengths = tuple(prefix + nodes for prefix, nodes in zip(self.prefix_lengths, self.num_nodes, strict=True))
        cache = make_paged_cache(
            lengths,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            generator=generator,
            dtype=dtype,
        )
        q_THE = torch.randn(sum(self.num_nodes), self.num_heads, self.head_size, generator=generator).to(dtype)
        visibility_BNN = None if self.window == "causal" else self._make_visibility(generator)
        inputs = {
            "q_THE": q_THE,
            "k_cache_PSGE": cache.k_cache_PSGE,
            "v_cache_PSGE": cache.v_cache_PSGE,
            "page_table_BP": cache.page_table_BP,
            "prefix_lengths_B": torch.tensor(self.prefix_lengths, dtype=torch.int32),
            "query_starts_B1": starts_of(self.num_nodes),
            "visibility_BNN": visibility_BNN,
        }
        placed = {name: None if tensor is None else tensor.to(device) for name, tensor in inputs.items()}
        return placed | {"scale": self.head_size**-0.5}

    def _make_visibility(self, generator: torch.Generator) -> torch.Tensor:
        widest = max(self.num_nodes)
        visibility_BNN = torch.zeros(len(self.num_nodes), widest, widest, dtype=torch.bool)
        for visibility_NN, num_nodes in zip(visibility_BNN, self.num_nodes, strict=True):
            for node in range(num_nodes):
                if node:
                    parent = node - 1 if self.window == "chain" else int(torch.randint(node, (), generator=generator))
                    visibility_NN[node] = visibility_NN[parent]
                visibility_NN[node, node] = True
        return visibility_BNN


TEST_CASES = (
    TreeAttentionCase(name="one", prefix_lengths=(0,), num_nodes=(1,)),
    TreeAttentionCase(name="plain", prefix_lengths=(9, 1, 4), num_nodes=(1, 1, 1), window="causal"),
    TreeAttentionCase(name="tree", prefix_lengths=(7, 12, 1), num_nodes=(9, 1, 17)),
    TreeAttentionCase(name="chain", prefix_lengths=(5, 3), num_nodes=(8, 8), window="chain"),
    TreeAttentionCase(name="prefill", prefix_lengths=(0, 8, 3), num_nodes=(13, 5, 0), window="causal"),
    TreeAttentionCase(name="page-of-1", prefix_lengths=(6,), num_nodes=(5,), page_size=1, num_kv_heads=4),
    TreeAttentionCase(name="one-kv-head", prefix_lengths=(31, 2), num_nodes=(7, 3), num_heads=5, num_kv_heads=1, head_size=24),
)

BENCH_CASES = tuple(
    TreeAttentionCase(
        name=f"qwen3-8b-width-{width}-batch-{batch}-context-{context}",
        prefix_lengths=(context,) * batch,
        num_nodes=(width,) * batch,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        page_size=16,
    )
    for width in (17, 65, 257)
    for batch in (1, 8, 32)
    for context in (2048, 16384, 65536)
)
