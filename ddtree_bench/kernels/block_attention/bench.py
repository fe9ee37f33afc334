"""What `block_attention` gives to the bench.

The alternative reads the context's keys, gathered, and the block's own in dense tensors, joined before the clock starts.

Letters: B sequences, T packed tokens, N block, H query heads, R query heads of a group, M = N × R, G key/value heads,
E head size, C keys of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ddtree_bench.kernels.bench import Cost, OpBench, Variant
from ddtree_bench.kernels.block_attention import reference
from ddtree_bench.kernels.block_attention.cases import BENCH_CASES, TEST_CASES, BlockAttentionCase
from ddtree_bench.kernels.paged import gather_pages
from ddtree_bench.kernels.paged_cases import check_attention_row

CANDIDATES: dict[str, dict[str, int]] = {
    "64-64x2": {"block_m": 64, "block_n": 64, "num_stages": 2, "programs_per_sm": 2},
    "64-64x3": {"block_m": 64, "block_n": 64, "num_stages": 3, "programs_per_sm": 2},
    "64-32x4": {"block_m": 64, "block_n": 32, "num_stages": 4, "programs_per_sm": 2},
    "64-128x3": {"block_m": 64, "block_n": 128, "num_stages": 3},
}


@dataclass(eq=False)
class Inputs:
    """Hold the arguments of the operation, and the dense copies that the alternative reads, made when first asked for."""

    arguments: dict[str, Any]
    context_lengths: tuple[int, ...]

    @cached_property
    def dense(self) -> dict[str, torch.Tensor]:
        """Return q_BGME (row node · R + head), k_BGCE and v_BGCE of sequences of one length."""
        arguments, batch_size = self.arguments, len(self.context_lengths)
        num_kv_heads = arguments["k_TGE"].shape[1]
        q_BNGRE = arguments["q_THE"].unflatten(0, (batch_size, -1)).unflatten(2, (num_kv_heads, -1))
        q_BGME = q_BNGRE.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
        k_BGCE, v_BGCE = (
            torch.stack(
                [
                    torch.cat([gather_pages(arguments[cache], pages, length), own_NGE])
                    for pages, length, own_NGE in zip(
                        arguments["page_table_BP"], self.context_lengths, arguments[own].chunk(batch_size), strict=True
                    )
                ]
            )
            .transpose(1, 2)
            .contiguous()
            for cache, own in (("k_cache_PSGE", "k_TGE"), ("v_cache_PSGE", "v_TGE"))
        )
        return {"q": q_BGME, "k": k_BGCE, "v": v_BGCE}


def make_inputs(case: BlockAttentionCase, seed: int, device: str) -> Inputs:
    """Draw the arguments on the device: bfloat16 on a GPU; slots that nothing was written to are NaN."""
    if device == "cpu":
        arguments = case.make_inputs(seed, dtype=torch.float16, device=device)
        return Inputs(arguments=arguments, context_lengths=case.context_lengths)
    small = BlockAttentionCase(
        name=case.name,
        context_lengths=(0,) * len(case.block_lengths),
        block_lengths=case.block_lengths,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        page_size=case.page_size,
    ).make_inputs(seed, dtype=torch.bfloat16, device=device)
    counts = [-(-length // case.page_size) for length in case.context_lengths]
    generator = torch.Generator(device).manual_seed(seed)
    pages = torch.randperm(sum(counts), generator=generator, device=device).int() + 1
    page_table_BP = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    shape = (sum(counts) + 1, case.page_size, case.num_kv_heads, case.head_size)
    caches = [torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for row, own in enumerate(pages.split(counts)):
        page_table_BP[row, : len(own)] = own
        num_last = case.context_lengths[row] - (len(own) - 1) * case.page_size
        for cache_PSGE in caches:
            cache_PSGE[own[-1:], num_last:] = torch.nan
    for cache_PSGE in caches:
        cache_PSGE[0] = torch.nan
    arguments = small | {
        "k_cache_PSGE": caches[0],
        "v_cache_PSGE": caches[1],
        "page_table_BP": page_table_BP,
        "context_lengths_B": torch.tensor(case.context_lengths, dtype=torch.int32, device=device),
    }
    return Inputs(arguments=arguments, context_lengths=case.context_lengths)


def check(case: BlockAttentionCase, inputs: Inputs, run: Any) -> None:
    """Compare with the reference, which accumulates in float32; the last sequence also with float64."""
    out_THE = run(inputs)
    arguments = inputs.arguments
    assert out_THE.isfinite().all(), f"{case.name}: the output holds NaN or infinity"
    expected_THE = reference.block_attention(**arguments)
    error = float((out_THE.double() - expected_THE.double()).abs().max())
    bound = 4 * torch.finfo(out_THE.dtype).eps * max(float(expected_THE.abs().max()), 2**-6)
    assert error <= bound, f"{case.name}: differs from the reference by {error}, more than {bound}"
    start, end = arguments["query_starts_B1"][-2:].tolist()
    k_CGE, v_CGE = (
        torch.cat(
            [gather_pages(arguments[cache], arguments["page_table_BP"][-1], case.context_lengths[-1]), arguments[own][start:end]]
        )
        for cache, own in (("k_cache_PSGE", "k_TGE"), ("v_cache_PSGE", "v_TGE"))
    )
    for token in range(start, end, max(1, (end - start) // 4)):
        check_attention_row(
            out_THE[token],
            arguments["q_THE"][token],
            k_CGE,
            v_CGE,
            arguments["scale"],
            where=f"{case.name}: token {token}",
        )


def variants(case: BlockAttentionCase, device: str) -> Sequence[Variant]:
    """List the kernel in use, its candidates, and PyTorch's fused attention."""
    from ddtree_bench.kernels.block_attention import triton_kernel
    from ddtree_bench.kernels.paged_triton import AttentionConfig

    def configured(name: str) -> Variant:
        config = AttentionConfig(**CANDIDATES[name])
        return Variant(name=f"triton-{name}", run=lambda inputs: triton_kernel.block_attention(**inputs.arguments, config=config))

    ours = Variant(name="triton", run=lambda inputs: triton_kernel.block_attention(**inputs.arguments))
    if case not in BENCH_CASES:
        return [ours]
    return [ours, *(configured(name) for name in CANDIDATES), Variant(name="sdpa", run=_run_sdpa, is_ours=False)]


def _run_sdpa(inputs: Inputs) -> torch.Tensor:
    """Attend with the heads of a group packed as queries, so that keys are not repeated."""
    dense = inputs.dense
    return torch.nn.functional.scaled_dot_product_attention(dense["q"], dense["k"], dense["v"], scale=inputs.arguments["scale"])


def cost(case: BlockAttentionCase) -> Cost:
    """Count keys, values and queries read once, outputs written once, and the products of queries with keys."""
    num_keys = sum(case.context_lengths) + sum(case.block_lengths)
    row_bytes = 2 * case.head_size
    pairs = sum(block * (context + block) for context, block in zip(case.context_lengths, case.block_lengths, strict=True))
    return Cost(
        num_bytes=2 * num_keys * case.num_kv_heads * row_bytes + 2 * sum(case.block_lengths) * case.num_heads * row_bytes,
        num_flops=4 * case.num_heads * case.head_size * pairs,
    )


BENCH = OpBench(
    op="block_attention",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
)
