"""Shapes and inputs of `build_tree`.

Letters: B sequences, D draft depths, K candidates of a depth.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TreeCase:
    """Name one shape; `num_levels` > 0 draws log-probabilities from that many values, so that scores tie."""

    name: str
    batch_size: int
    num_depths: int
    top_k: int
    node_budget: int
    num_levels: int = 0

    def make_inputs(self, seed: int, *, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Draw the arguments of `build_tree` except max_nodes; caps differ between the sequences of a batch."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch_size, self.num_depths, self.top_k)
        if self.num_levels:
            surprise_BDK = torch.randint(self.num_levels, shape, generator=generator) / 4
        else:
            surprise_BDK = -torch.rand(shape, generator=generator).log()
        noise = torch.rand(self.batch_size, self.num_depths, self.top_k + 5, generator=generator)
        place_B = torch.arange(self.batch_size)
        inputs = {
            "topk_logprobs_BDK": -surprise_BDK.sort(dim=-1).values,
            "topk_tokens_BDK": noise.argsort(dim=-1)[..., : self.top_k].contiguous(),
            "root_tokens_B": torch.randint(self.top_k + 5, (self.batch_size,), generator=generator),
            "node_budget_B": (self.node_budget - place_B).clamp(min=0).int(),
            "depth_B": (self.num_depths - place_B % 3).clamp(min=0).int(),
            "branching_B": (self.top_k - place_B % 2).clamp(min=1).int(),
        }
        return {name: tensor.to(device) for name, tensor in inputs.items()}


TEST_CASES = (
    TreeCase(name="one", batch_size=1, num_depths=1, top_k=1, node_budget=1),
    TreeCase(name="budget-0", batch_size=2, num_depths=3, top_k=2, node_budget=0),
    TreeCase(name="odd", batch_size=5, num_depths=7, top_k=3, node_budget=21),
    TreeCase(name="ties", batch_size=4, num_depths=5, top_k=4, node_budget=33, num_levels=3),
    TreeCase(name="caps-bind", batch_size=3, num_depths=2, top_k=3, node_budget=40),
)

BENCH_CASES = (
    TreeCase(name="budget-64-batch-1", batch_size=1, num_depths=15, top_k=32, node_budget=64),
    TreeCase(name="budget-256-batch-32", batch_size=32, num_depths=15, top_k=32, node_budget=256),
    TreeCase(name="budget-1024-batch-8", batch_size=8, num_depths=31, top_k=64, node_budget=1024),
)
