"""Shapes and inputs of `write_kv`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class WriteKvCase:
    """Name one shape; `num_skipped` of the tokens carry a negative slot."""

    name: str
    num_tokens: int
    num_pages: int
    page_size: int
    num_skipped: int = 0
    num_kv_heads: int = 2
    head_size: int = 16

    def make_inputs(self, seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Draw the arguments of `write_kv`; the caches are NaN."""
        generator = torch.Generator().manual_seed(seed)
        cache_shape = (self.num_pages, self.page_size, self.num_kv_heads, self.head_size)
        slots_T = torch.randperm(self.num_pages * self.page_size, generator=generator)[: self.num_tokens]
        slots_T[torch.randperm(self.num_tokens, generator=generator)[: self.num_skipped]] = -1
        inputs = {
            "k_TGE": torch.randn(self.num_tokens, *cache_shape[2:], generator=generator).to(dtype),
            "v_TGE": torch.randn(self.num_tokens, *cache_shape[2:], generator=generator).to(dtype),
            "k_cache_PSGE": torch.full(cache_shape, torch.nan, dtype=dtype),
            "v_cache_PSGE": torch.full(cache_shape, torch.nan, dtype=dtype),
            "slots_T": slots_T,
        }
        return {name: tensor.to(device) for name, tensor in inputs.items()}


TEST_CASES = (
    WriteKvCase(name="one", num_tokens=1, num_pages=1, page_size=1),
    WriteKvCase(name="none", num_tokens=0, num_pages=2, page_size=4),
    WriteKvCase(name="odd", num_tokens=13, num_pages=5, page_size=7),
    WriteKvCase(name="skipped", num_tokens=9, num_pages=3, page_size=5, num_skipped=4),
    WriteKvCase(name="full", num_tokens=12, num_pages=3, page_size=4, num_kv_heads=1, head_size=3),
)

BENCH_CASES = tuple(
    WriteKvCase(
        name=f"qwen3-8b-{num_tokens}-tokens", num_tokens=num_tokens, num_pages=1024, page_size=16, num_kv_heads=8, head_size=128
    )
    for num_tokens in (1, 65, 520)
)
