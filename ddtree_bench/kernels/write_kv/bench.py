"""What `write_kv` gives to the bench; the alternative is torch's index_copy_.

Letters: T packed tokens, G key/value heads, E head size, P pages of a cache, S slots of a page.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddtree_bench.kernels.bench import Cost, OpBench, Variant
from ddtree_bench.kernels.write_kv import reference
from ddtree_bench.kernels.write_kv.cases import BENCH_CASES, TEST_CASES, WriteKvCase

_DTYPE = torch.bfloat16
_CACHES = ("k_cache_PSGE", "v_cache_PSGE")


def make_inputs(case: WriteKvCase, seed: int, device: str) -> dict[str, Any]:
    """Draw the arguments of `write_kv`."""
    return case.make_inputs(seed, dtype=_DTYPE, device=device)


def check(case: WriteKvCase, inputs: dict[str, Any], run: Callable[[Any], None]) -> None:
    """Compare the caches with the reference's, exactly; what was not written stays NaN."""
    expected = inputs | {name: inputs[name].clone() for name in _CACHES}
    reference.write_kv(**expected)
    run(inputs)
    for name in _CACHES:
        is_same = torch.equal(inputs[name].nan_to_num(1e4), expected[name].nan_to_num(1e4))
        assert is_same, f"{case.name}: {name} differs from the reference"


def variants(case: WriteKvCase, device: str) -> Sequence[Variant]:
    """List the kernel in its configurations, and torch."""
    from ddtree_bench.kernels.write_kv import triton_kernel

    return [
        Variant(name="triton", run=lambda inputs: triton_kernel.write_kv(**inputs)),
        Variant(name="triton-512-columns", run=lambda inputs: triton_kernel.write_kv(**inputs, max_block=512, num_warps=2)),
        Variant(name="torch index_copy_", run=_torch, is_ours=False),
    ]


def _torch(inputs: dict[str, Any]) -> None:
    """Write keys and values with all slots being valid."""
    for rows, cache in (("k_TGE", "k_cache_PSGE"), ("v_TGE", "v_cache_PSGE")):
        inputs[cache].flatten(0, 1).index_copy_(0, inputs["slots_T"], inputs[rows])


def cost(case: WriteKvCase) -> Cost:
    """Count the rows read once and written once."""
    num_written = case.num_tokens - case.num_skipped
    return Cost(num_bytes=2 * 2 * num_written * case.num_kv_heads * case.head_size * _DTYPE.itemsize)


BENCH = OpBench(
    op="write_kv",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
    is_in_place=True,
)
