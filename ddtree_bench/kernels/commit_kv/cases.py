"""Shapes and inputs of `commit_kv`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class CommitKvCase:
    """Name one shape: of each sequence the prefix length and the accepted nodes, root first."""

    name: str
    prefix_lengths: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    window: int
    num_layers: int = 3
    page_size: int = 4
    num_kv_heads: int = 2
    head_size: int = 8

    def make_inputs(self, seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
        """Draw the arguments of `commit_kv`: sequences in scattered pages, the pairs of all sequences side by side."""
        generator = torch.Generator().manual_seed(seed)
        pages_each = -(-(max(self.prefix_lengths) + self.window) // self.page_size)
        table_BP = torch.randperm(len(self.paths) * pages_each, generator=generator).unflatten(0, (len(self.paths), -1))
        cache_shape = (self.num_layers, table_BP.numel(), self.page_size, self.num_kv_heads, self.head_size)
        # The caches of the bench are large, so they are drawn where they are used.
        on_device = generator if device == "cpu" else torch.Generator(device).manual_seed(seed)

        def caches() -> list[torch.Tensor]:
            return list(torch.randn(cache_shape, generator=on_device, device=device).to(dtype))

        def slots(row: int, positions: torch.Tensor) -> torch.Tensor:
            return table_BP[row, positions // self.page_size] * self.page_size + positions % self.page_size

        sources, destinations = [], []
        for row, (prefix_length, path) in enumerate(zip(self.prefix_lengths, self.paths, strict=True)):
            sources.append(slots(row, prefix_length + torch.tensor(path)))
            destinations.append(slots(row, prefix_length + torch.arange(len(path))))
        return {
            "k_caches_LPSGE": caches(),
            "v_caches_LPSGE": caches(),
            "source_slots_M": torch.cat(sources).to(device),
            "destination_slots_M": torch.cat(destinations).to(device),
        }


TEST_CASES = (
    CommitKvCase(name="one", prefix_lengths=(1,), paths=((0,),), window=1, num_layers=1, page_size=1),
    CommitKvCase(name="scattered", prefix_lengths=(7,), paths=((0, 3, 9),), window=10),
    CommitKvCase(name="overlap", prefix_lengths=(5,), paths=((0, 2, 3, 4, 5, 6),), window=7),
    CommitKvCase(name="batch", prefix_lengths=(3, 9, 0), paths=((0, 1, 2), (0, 5), (0, 4, 6, 7, 12)), window=13, page_size=3),
)

BENCH_CASES = tuple(
    CommitKvCase(
        name=f"qwen3-8b-path-8-batch-{batch}",
        prefix_lengths=(2048,) * batch,
        paths=((0, 2, 5, 9, 14, 20, 27, 35, 44),) * batch,
        window=65,
        num_layers=36,
        page_size=16,
        num_kv_heads=8,
        head_size=128,
    )
    for batch in (1, 8, 32)
)
