"""What `build_tree` gives to the bench.

The alternative is the reference: the heap on the host, with the copies to the host and back.

Letters: B sequences, D draft depths, K candidates of a depth, N room for nodes of a tree.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ddtree_bench.kernels.bench import Cost, OpBench, Variant
from ddtree_bench.kernels.build_tree import reference
from ddtree_bench.kernels.build_tree.cases import BENCH_CASES, TEST_CASES, TreeCase
from ddtree_bench.kernels.build_tree.tree_batch import TreeBatch

CONFIGS = {
    "1-warp": {"num_warps": 1},
    "2-warps": {"num_warps": 2, "table_block": 1024},
    "4-warps": {"num_warps": 4, "table_block": 2048},
    "8-warps": {"num_warps": 8, "table_block": 4096},
    "1-warp-64-bit-minimum": {"num_warps": 1, "splits_cost": False},
}


def make_inputs(case: TreeCase, seed: int, device: str) -> dict[str, Any]:
    """Draw the arguments of `build_tree`."""
    return case.make_inputs(seed, device=device) | {"max_nodes": case.node_budget + 1}


def check(case: TreeCase, inputs: dict[str, Any], run: Any) -> None:
    """Compare every tensor with the reference, exactly."""
    batch = run(inputs)
    expected = reference.build_tree(**inputs)
    for field in dataclasses.fields(TreeBatch):
        values, expected_values = getattr(batch, field.name), getattr(expected, field.name)
        assert values.dtype == expected_values.dtype, f"{case.name}: {field.name} is {values.dtype}"
        assert torch.equal(values, expected_values), f"{case.name}: {field.name} differs from the reference"


def variants(case: TreeCase, device: str) -> Sequence[Variant]:
    """List the kernels in their configurations, and the heap on the host."""
    from ddtree_bench.kernels.build_tree import triton_kernel

    def configured(name: str, options: dict[str, Any]) -> Variant:
        config = triton_kernel.BuildConfig(**options)
        return Variant(name=f"triton-{name}", run=lambda inputs: triton_kernel.build_tree(**inputs, config=config))

    return [
        Variant(name="triton", run=lambda inputs: triton_kernel.build_tree(**inputs)),
        *(configured(name, options) for name, options in CONFIGS.items()),
        Variant(name="host heap", run=lambda inputs: reference.build_tree(**inputs), is_ours=False, is_capturable=False),
    ]


def cost(case: TreeCase) -> Cost:
    """Count the table and the caps read once, and the trees written once."""
    num_entries, max_nodes = case.num_depths * case.top_k, case.node_budget + 1
    read_bytes = num_entries * (4 + 8) + 8 + 3 * 4
    written_bytes = max_nodes * (8 + 5 * 4 + max_nodes) + 4
    return Cost(num_bytes=case.batch_size * (read_bytes + written_bytes))


BENCH = OpBench(
    op="build_tree",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
)
