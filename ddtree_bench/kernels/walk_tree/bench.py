"""What `walk_tree` gives to the bench; the alternative is the reference, which waits for the device at every step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddtree_bench.kernels.bench import Cost, OpBench, Variant
from ddtree_bench.kernels.walk_tree import reference
from ddtree_bench.kernels.walk_tree.cases import BENCH_CASES, TEST_CASES, WalkCase
from ddtree_bench.kernels.walk_tree.walk_batch import WalkBatch


def make_inputs(case: WalkCase, seed: int, device: str) -> dict[str, Any]:
    """Draw the arguments of `walk_tree`."""
    return case.make_inputs(seed, device=device)


def check(case: WalkCase, inputs: dict[str, Any], run: Callable[[Any], WalkBatch]) -> None:
    """Compare every tensor with the reference, exactly."""
    walks, expected = run(inputs), reference.walk_tree(**inputs)
    for name in (one.name for one in dataclasses.fields(WalkBatch)):
        assert torch.equal(getattr(walks, name), getattr(expected, name)), f"{case.name}: {name} differs from the reference"


def variants(case: WalkCase, device: str) -> Sequence[Variant]:
    """List the kernel, and torch."""
    from ddtree_bench.kernels.walk_tree import triton_kernel

    return [
        Variant(name="triton", run=lambda inputs: triton_kernel.walk_tree(**inputs)),
        Variant(name="torch", run=lambda inputs: reference.walk_tree(**inputs), is_ours=False, is_capturable=False),
    ]


def cost(case: WalkCase) -> Cost:
    """Count tokens, parents and choices read once, and the walk written once."""
    return Cost(num_bytes=len(case.num_nodes) * (case.max_nodes * (8 + 4 + 8 + 4) + 4 + 4 + 8))


BENCH = OpBench(
    op="walk_tree",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
)
