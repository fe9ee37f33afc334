"""Shapes and inputs of `topk_logprobs`.

Letters: R rows, V vocabulary.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TopkCase:
    """Name one shape; `num_levels` > 0 draws logits from that many values, so that rows are full of ties."""

    name: str
    num_rows: int
    vocab_size: int
    k: int
    num_levels: int = 0

    def make_logits(self, seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        """Draw logits_RV, on the device itself: a seed gives other values there than on the CPU."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.num_rows, self.vocab_size)
        if self.num_levels:
            return torch.randint(self.num_levels, shape, generator=generator, device=device).to(dtype)
        return (torch.randn(shape, generator=generator, device=device) * 3).to(dtype)


TEST_CASES = (
    TopkCase(name="one", num_rows=1, vocab_size=1, k=1),
    TopkCase(name="k-beyond-vocab", num_rows=2, vocab_size=3, k=5),
    TopkCase(name="odd", num_rows=7, vocab_size=1001, k=13),
    TopkCase(name="ties", num_rows=5, vocab_size=257, k=31, num_levels=4),
    TopkCase(name="all-equal", num_rows=3, vocab_size=97, k=8, num_levels=1),
    TopkCase(name="tiny-dense", num_rows=15, vocab_size=8192, k=8),
)

BENCH_CASES = tuple(
    TopkCase(name=f"qwen3-8b-batch-{batch}", num_rows=15 * batch, vocab_size=151_936, k=32) for batch in (1, 8, 32)
)
