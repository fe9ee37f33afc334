"""What `argmax_merge` gives to the bench: `local_argmax` of target logits; the alternative is torch's argmax.

Letters: R rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddtree_bench.kernels.argmax_merge import reference
from ddtree_bench.kernels.argmax_merge.cases import BENCH_CASES, TEST_CASES, ArgmaxCase
from ddtree_bench.kernels.bench import Cost, OpBench, Variant

_DTYPE = torch.bfloat16


def make_inputs(case: ArgmaxCase, seed: int, device: str) -> torch.Tensor:
    """Draw scores_RV."""
    return case.make_scores(seed, dtype=_DTYPE, device=device)


def check(case: ArgmaxCase, inputs: torch.Tensor, run: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compare value and token with the reference, exactly."""
    value_R, token_R = run(inputs)
    expected_value_R, expected_token_R = reference.local_argmax(inputs, 0)
    assert torch.equal(value_R, expected_value_R), f"{case.name}: values differ from the reference"
    assert torch.equal(token_R, expected_token_R), f"{case.name}: tokens differ from the reference"


def variants(case: ArgmaxCase, device: str) -> Sequence[Variant]:
    """List the kernel in its configurations, and torch."""
    from ddtree_bench.kernels.argmax_merge import triton_kernel

    def triton(block: int = 4096, num_warps: int = 4) -> Callable[[Any], Any]:
        return lambda scores_RV: triton_kernel.local_argmax(scores_RV, 0, block=block, num_warps=num_warps)

    return [
        Variant(name="triton", run=triton()),
        Variant(name="triton-8192-8-warps", run=triton(8192, 8)),
        Variant(name="triton-8192-4-warps", run=triton(8192)),
        Variant(name="triton-2048-4-warps", run=triton(2048)),
        Variant(name="torch max", run=lambda scores_RV: scores_RV.max(dim=1), is_ours=False),
    ]


def cost(case: ArgmaxCase) -> Cost:
    """Count the scores read once."""
    return Cost(num_bytes=case.num_rows * (case.vocab_size * _DTYPE.itemsize + 4 + 8))


BENCH = OpBench(
    op="argmax_merge",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
    max_input_sets=40,
)
