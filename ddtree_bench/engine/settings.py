"""What an engine is started with; one frozen value, the same on every rank.

Owns the defaults of memory and scheduling. The tree setting comes from `ddtree_bench.config`; what a value does is left
to the part that uses it. Standard library only, so that it can be made before torch is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ddtree_bench.config import DEVICES, DTYPES, LOAD_FORMATS, TreeSetting
from ddtree_bench.errors import unknown_name

MAX_THREADS = 1024
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How one engine runs.

    Args:
        model: checkpoint folder or bundled name.
        drafter: the same for the drafter; None is the model's bundled one.
        tree: mode and tree setting; its canonical form is what runs.
        page_size: cache slots of a page.
        max_running_requests: sequences that decode together at most.
        max_total_tokens: cache slots of the pool; None sizes it from free memory.
        max_context: most tokens of prompt and output together; None is the model's, or what fits the pool.
        max_prefill_tokens: most prompt tokens of one prefill step; longer prompts run in chunks.
        threads: compute threads of each rank on the CPU; None picks.
        seed: of the random weights that load_format "dummy" makes.
    """

    model: str = "tiny-dense"
    drafter: str | None = None
    tree: TreeSetting = field(default_factory=TreeSetting)
    device: str = "cpu"
    dtype: str = "float32"
    page_size: int = 16
    max_running_requests: int = 16
    max_total_tokens: int | None = None
    max_context: int | None = None
    max_prefill_tokens: int = 1024
    load_format: str = "auto"
    tensor_parallel: int = 1
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("device", DEVICES), ("dtype", DTYPES), ("load_format", LOAD_FORMATS)):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        counts = ("page_size", "max_running_requests", "max_prefill_tokens", "tensor_parallel")
        optional = ("max_total_tokens", "max_context", "threads")
        for name in (*counts, *(n for n in optional if getattr(self, n) is not None)):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; given {getattr(self, name)!r}; raise it")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ValueError(f"threads must be at most {MAX_THREADS}; given {self.threads}; a rank gains nothing above its cores")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be between 0 and {MAX_SEED}; given {self.seed}")

    @property
    def threads_per_rank(self) -> int:
        """Compute threads of one rank: what was asked for, else every core's share up to 4.

        Small models gain nothing beyond a few threads, and a rank that has more threads than cores waits for itself.
        """
        if self.threads is not None:
            return self.threads
        num_cores = len(os.sched_getaffinity(0))
        return max(1, min(4, num_cores // (2 * self.tensor_parallel)))


def thread_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the variables to set before torch is imported: idle threads must sleep, not spin, on shared cores."""
    threads = str(settings.threads_per_rank)
    return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
