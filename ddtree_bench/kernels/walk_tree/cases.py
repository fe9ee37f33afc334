"""Shapes and inputs of `walk_tree`.

Letters: B sequences, N room for nodes of a tree.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class WalkCase:
    """Name one shape: the sizes of the trees and the length of the path that the target takes in each."""

    name: str
    num_nodes: tuple[int, ...]
    num_accepted: tuple[int, ...]
    max_nodes: int

    def make_inputs(self, seed: int, *, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Draw the arguments of `walk_tree`; what lies beyond num_nodes invites the walk and must be ignored."""
        rng = np.random.default_rng(seed)
        shape = (len(self.num_nodes), self.max_nodes)
        tokens_BN = np.tile(rng.permutation(self.max_nodes), (len(self.num_nodes), 1))
        parents_BN = np.zeros(shape, dtype=np.int32)
        targets_BN = np.full(shape, self.max_nodes + 7)
        for row, (num_nodes, num_accepted) in enumerate(zip(self.num_nodes, self.num_accepted, strict=True)):
            parents_BN[row, 1:num_nodes] = [rng.integers(node) for node in range(1, num_nodes)]
            path = np.concatenate([[0], np.sort(rng.permutation(num_nodes - 1)[:num_accepted]) + 1]).astype(int)
            parents_BN[row, path[1:]] = path[:-1]
            targets_BN[row, path[:-1]] = tokens_BN[row, path[1:]]
            if num_nodes < self.max_nodes:
                parents_BN[row, num_nodes:] = path[-1]
                targets_BN[row, path[-1]] = tokens_BN[row, num_nodes]
        parents_BN[:, 0] = -1
        inputs = {
            "tokens_BN": torch.from_numpy(tokens_BN),
            "parents_BN": torch.from_numpy(parents_BN),
            "num_nodes_B": torch.tensor(self.num_nodes, dtype=torch.int32),
            "target_tokens_BN": torch.from_numpy(targets_BN),
        }
        return {name: tensor.to(device) for name, tensor in inputs.items()}


TEST_CASES = (
    WalkCase(name="one", num_nodes=(1,), num_accepted=(0,), max_nodes=1),
    WalkCase(name="accept-1-5-16", num_nodes=(17, 64, 33), num_accepted=(1, 5, 16), max_nodes=64),
    WalkCase(name="whole-chain", num_nodes=(16, 16), num_accepted=(15, 0), max_nodes=16),
    WalkCase(name="odd", num_nodes=(1, 3, 7, 2, 5), num_accepted=(0, 1, 3, 1, 0), max_nodes=9),
)

BENCH_CASES = tuple(
    WalkCase(name=f"width-{width}-batch-{batch}", num_nodes=(width,) * batch, num_accepted=(8,) * batch, max_nodes=width)
    for width in (17, 65, 257)
    for batch in (1, 8, 32)
)
