"""Shapes and inputs of `argmax_merge`.

Letters: R rows, V vocabulary.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ArgmaxCase:
    """Name one shape; `num_levels` > 0 draws scores from that many values, so that rows are full of ties."""

    name: str
    num_rows: int
    vocab_size: int
    num_levels: int = 0

    def make_scores(self, seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        """Draw scores_RV, on the device itself: a seed gives other values there than on the CPU."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.num_rows, self.vocab_size)
        if self.num_levels:
            return torch.randint(self.num_levels, shape, generator=generator, device=device).to(dtype)
        return torch.randn(shape, generator=generator, device=device).to(dtype)


TEST_CASES = (
    ArgmaxCase(name="one", num_rows=1, vocab_size=1),
    ArgmaxCase(name="odd", num_rows=7, vocab_size=1001),
    ArgmaxCase(name="ties", num_rows=9, vocab_size=257, num_levels=3),
    ArgmaxCase(name="all-equal", num_rows=3, vocab_size=96, num_levels=1),
)

BENCH_CASES = tuple(
    ArgmaxCase(name=f"qwen3-8b-{num_rows}-rows", num_rows=num_rows, vocab_size=151_936) for num_rows in (1, 17, 65, 520)
)
