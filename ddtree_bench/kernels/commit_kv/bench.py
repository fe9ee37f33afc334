"""What `commit_kv` gives to the bench; the alternatives are torch, layer by layer and on the stacked caches.

Letters: L layers, M rows to move, P pages of a cache, S slots of a page, G key/value heads, E head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddtree_bench.kernels.bench import Cost, OpBench, Variant
from ddtree_bench.kernels.commit_kv import reference
from ddtree_bench.kernels.commit_kv.cases import BENCH_CASES, TEST_CASES, CommitKvCase

_DTYPE = torch.bfloat16
_CACHES = ("k_caches_LPSGE", "v_caches_LPSGE")


def make_inputs(case: CommitKvCase, seed: int, device: str) -> dict[str, Any]:
    """Draw the arguments of `commit_kv`, the caches on the device that they are for."""
    return case.make_inputs(seed, dtype=_DTYPE, device=device)


def check(case: CommitKvCase, inputs: dict[str, Any], run: Callable[[Any], None]) -> None:
    """Compare the caches with the reference's, exactly."""
    expected = inputs | {name: [cache_PSGE.clone() for cache_PSGE in inputs[name]] for name in _CACHES}
    reference.commit_kv(**expected)
    run(inputs)
    for name in _CACHES:
        for layer, (found_PSGE, expected_PSGE) in enumerate(zip(inputs[name], expected[name], strict=True)):
            assert torch.equal(found_PSGE, expected_PSGE), f"{case.name}: layer {layer} of {name} differs from the reference"


def variants(case: CommitKvCase, device: str) -> Sequence[Variant]:
    """List the kernel with several widths, its two-launch form, and torch."""
    from ddtree_bench.kernels.commit_kv import triton_kernel

    def triton(**options: Any) -> Callable[[Any], None]:
        return lambda inputs: triton_kernel.commit_kv(**inputs, **options)

    return [
        Variant(name="triton", run=triton()),
        Variant(name="triton-32-columns", run=triton(block=32)),
        Variant(name="triton-64-columns", run=triton(block=64)),
        Variant(name="triton-128-columns", run=triton(block=128)),
        Variant(name="triton-two-launches", run=triton(max_tile=16)),
        Variant(name="torch, layer by layer", run=_torch_layers, is_ours=False),
    ]


def _torch_layers(inputs: dict[str, Any]) -> None:
    """Move with one gather and one scatter a cache, all slots being valid."""
    sources_M, destinations_M = inputs["source_slots_M"], inputs["destination_slots_M"]
    for name in _CACHES:
        for cache_PSGE in inputs[name]:
            flat = cache_PSGE.flatten(0, 1)
            flat.index_copy_(0, destinations_M, flat.index_select(0, sources_M))


def cost(case: CommitKvCase) -> Cost:
    """Count the rows that move, read once and written once; roots stay where they are."""
    num_moved = sum(node != place for path in case.paths for place, node in enumerate(path))
    row_bytes = case.num_kv_heads * case.head_size * _DTYPE.itemsize
    return Cost(num_bytes=2 * 2 * case.num_layers * num_moved * row_bytes)


BENCH = OpBench(
    op="commit_kv",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
    max_input_sets=3,
    is_in_place=True,
)
