"""Who this process is among the tensor-parallel ranks, and the three collectives that models need.

With one rank every collective is the identity and torch.distributed is never touched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Parallel:
    """One rank of a tensor-parallel group.

    Args:
        rank: this process, 0-based.
        world_size: number of ranks.
        group: process group; None is the default group.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be in [0, world_size); got rank={self.rank}, world_size={self.world_size}; "
                "pass the rank and size that the launcher gave this process"
            )

    @classmethod
    def single(cls) -> Parallel:
        """Return the group of one."""
        return cls()

    @classmethod
    def from_process_group(cls, group: Any = None) -> Parallel:
        """Return this process's place in an initialised torch.distributed group."""
        return cls(rank=dist.get_rank(group), world_size=dist.get_world_size(group), group=group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over ranks; `x` itself is overwritten when there are several."""
        if self.world_size > 1:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' `x`, all of one shape, concatenated along `dim` in rank order."""
        if self.world_size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim=dim)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return rank `source`'s picklable `value` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        source_rank = source if self.group is None else dist.get_global_rank(self.group, source)
        dist.broadcast_object_list(box, src=source_rank, group=self.group)
        return box[0]

    def shard_range(self, total: int, what: str = "total") -> tuple[int, int]:
        """Return [start, stop) of this rank's equal share of `total` items.

        Raises:
            ValueError: `total` does not divide by the number of ranks.
        """
        if total % self.world_size:
            raise ValueError(
                f"{what} must divide by the tensor-parallel degree; got {what}={total} and "
                f"{self.world_size} ranks; choose a degree that divides {total}"
            )
        size = total // self.world_size
        return self.rank * size, (self.rank + 1) * size

    def kv_head_range(self, num_kv_heads: int) -> tuple[int, int]:
        """Return [start, stop) of the key/value heads this rank holds.

        With more ranks than heads each head is held by several consecutive ranks.

        Raises:
            ValueError: neither number divides the other.
        """
        if num_kv_heads >= self.world_size:
            return self.shard_range(num_kv_heads, "num_key_value_heads")
        if self.world_size % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads must divide the tensor-parallel degree or be divided by it; got "
                f"num_key_value_heads={num_kv_heads} and {self.world_size} ranks; choose another degree"
            )
        head = self.rank * num_kv_heads // self.world_size
        return head, head + 1
