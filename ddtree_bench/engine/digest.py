"""Proof, every step, that tensor-parallel ranks hold the same tree and took the same walk.

Ranks that differ would run collectives of different shapes next and hang; one small exchange turns that into an error
on every rank that names the step.
"""

from __future__ import annotations

import hashlib

import torch

from ddtree_bench.errors import RanksDisagreeError
from ddtree_bench.models.parallel import Parallel


def digest_of(tensors: list[torch.Tensor]) -> int:
    """Return 63 bits that depend on every value, in order."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(tensor.cpu().numpy().tobytes())
    return int.from_bytes(state.digest(), "little") >> 1


def check_ranks_agree(tensors: list[torch.Tensor], parallel: Parallel, *, round_number: int, what: str) -> None:
    """Compare what the ranks decided; every rank must call it at the same point.

    Raises:
        RanksDisagreeError: on every rank, where one differs.
    """
    if parallel.world_size == 1:
        return
    device = tensors[0].device
    own = torch.tensor([digest_of(tensors)], dtype=torch.int64, device=device)
    digests = parallel.all_gather(own, dim=0).tolist()
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise RanksDisagreeError(
            f"all ranks must hold the same {what}; in round {round_number} ranks {differing} differ from rank 0; "
            "restart the server, and report the setting if it happens again"
        )
