"""What `tree_attention` gives to the bench.

Alternatives read keys and values that were gathered into dense tensors before the clock starts, which is more than they
would get in an engine. `triton-causal` is ours on the same windows without a mask: it shows what the mask costs.

Letters: B sequences, T packed tokens, N window, H query heads, R query heads of a group, M = N × R, G key/value heads,
E head size, C keys of a sequence, P pages, S slots of a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ddtree_bench.kernels.bench import Cost, OpBench, Unavailable, Variant
from ddtree_bench.kernels.paged import gather_pages
from ddtree_bench.kernels.paged_cases import check_attention_row, starts_of
from ddtree_bench.kernels.tree_attention import reference
from ddtree_bench.kernels.tree_attention.cases import BENCH_CASES, TEST_CASES, TreeAttentionCase

CANDIDATES: dict[str, dict[str, int]] = {
    "128-128x3": {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 3},
    "128-64x3": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3},
    "64-64x3": {"block_m": 64, "block_n": 64, "num_stages": 3, "programs_per_sm": 2},
}
NARROW = ("128-128x3", "128-64x3", "64-64x3")
WIDE = ("128-128x3", "128-64x3")
FLEX_BATCH, FLEX_CONTEXT = 8, 16384  # compiling takes half a minute a shape, so one context stands for all
NUM_CHECKED_QUERIES = 6


@dataclass(eq=False)
class Inputs:
    """Hold the arguments of the operation, and the dense copies that alternatives read, made when first asked for."""

    arguments: dict[str, Any]
    lengths: tuple[int, ...]
    num_nodes: int

    @cached_property
    def dense(self) -> dict[str, torch.Tensor]:
        """Return q_BGME (row node · R + head), k_BGCE, v_BGCE and a mask_B1MC of the queries' dtype (0 or -inf)."""
        arguments = self.arguments
        q_BNHE = arguments["q_THE"].unflatten(0, (len(self.lengths), self.num_nodes))
        num_kv_heads = arguments["k_cache_PSGE"].shape[2]
        q_BGME = q_BNHE.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
        group_size = q_BNHE.shape[2] // num_kv_heads
        num_keys = self.lengths[0] + self.num_nodes
        k_BGCE, v_BGCE = (
            torch.stack([gather_pages(arguments[name], pages, num_keys) for pages in arguments["page_table_BP"]])
            .transpose(1, 2)
            .contiguous()
            for name in ("k_cache_PSGE", "v_cache_PSGE")
        )
        # Fused implementations want rows of the mask to start at multiples of 16 bytes.
        mask_BMC = q_BNHE.new_zeros(len(self.lengths), q_BGME.shape[2], -(-num_keys // 16) * 16)
        hidden_BMN = ~arguments["visibility_BNN"].repeat_interleave(group_size, dim=1)
        mask_BMC[:, :, self.lengths[0] : num_keys].masked_fill_(hidden_BMN, float("-inf"))
        return {"q": q_BGME, "k": k_BGCE, "v": v_BGCE, "mask": mask_BMC[:, None, :, :num_keys]}


def make_inputs(case: TreeAttentionCase, seed: int, device: str) -> Inputs:
    """Draw the arguments on the device: bfloat16 on a GPU; slots that nothing was written to are NaN."""
    num_nodes = max(case.num_nodes)
    if device == "cpu":
        arguments = case.make_inputs(seed, dtype=torch.float16, device=device)
        return Inputs(arguments=arguments, lengths=case.prefix_lengths, num_nodes=num_nodes)
    counts = [-(-(prefix + nodes) // case.page_size) for prefix, nodes in zip(case.prefix_lengths, case.num_nodes, strict=True)]
    generator = torch.Generator(device).manual_seed(seed)
    pages = torch.randperm(sum(counts), generator=generator, device=device).int() + 1
    page_table_BP = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    shape = (sum(counts) + 1, case.page_size, case.num_kv_heads, case.head_size)
    caches = [torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for row, own in enumerate(pages.split(counts)):
        page_table_BP[row, : len(own)] = own
        num_last = case.prefix_lengths[row] + case.num_nodes[row] - (len(own) - 1) * case.page_size
        for cache_PSGE in caches:
            cache_PSGE[own[-1:], num_last:] = torch.nan
    for cache_PSGE in caches:
        cache_PSGE[0] = torch.nan
    batch_size, num_tokens = len(counts), sum(case.num_nodes)
    arguments = {
        "q_THE": torch.randn(
            num_tokens, case.num_heads, case.head_size, generator=generator, dtype=torch.bfloat16, device=device
        ),
        "k_cache_PSGE": caches[0],
        "v_cache_PSGE": caches[1],
        "page_table_BP": page_table_BP,
        "prefix_lengths_B": torch.tensor(case.prefix_lengths, dtype=torch.int32, device=device),
        "query_starts_B1": starts_of(case.num_nodes).to(device),
        "visibility_BNN": _draw_visibility(batch_size, num_nodes, case.window, generator) if case.window != "causal" else None,
        "scale": case.head_size**-0.5,
    }
    return Inputs(arguments=arguments, lengths=case.prefix_lengths, num_nodes=num_nodes)


def _draw_visibility(batch_size: int, num_nodes: int, window: str, generator: torch.Generator) -> torch.Tensor:
    """Draw a random tree for each sequence (or a chain) on the generator's device, without a loop over nodes."""
    device = generator.device
    node_N = torch.arange(num_nodes, device=device)
    parents_BN = node_N.sub(1).clamp(min=0).expand(batch_size, num_nodes)
    if window == "tree":
        parents_BN = (torch.rand(batch_size, num_nodes, generator=generator, device=device) * node_N).long()
    reach_BNN = torch.eye(num_nodes, device=device).repeat(batch_size, 1, 1).scatter_(2, parents_BN[..., None], 1.0)
    # Each product doubles how far up a node sees.
    for _ in range(num_nodes.bit_length()):
        reach_BNN = (reach_BNN @ reach_BNN > 0).float()
    return reach_BNN > 0


def check(case: TreeAttentionCase, inputs: Inputs, run: Any) -> None:
    """Compare some queries of the first and last sequence with float64; all of a small case with the reference."""
    out_THE = run(inputs)
    arguments = inputs.arguments
    assert out_THE.isfinite().all(), f"{case.name}: the output holds NaN or infinity"
    if sum(case.prefix_lengths) <= 4096:
        expected_THE = reference.tree_attention(**arguments)
        error = float((out_THE.double() - expected_THE.double()).abs().max())
        bound = 4 * torch.finfo(out_THE.dtype).eps * max(1.0, float(expected_THE.abs().max()))
        assert error <= bound, f"{case.name}: differs from the reference by {error}, more than {bound}"
    starts = arguments["query_starts_B1"].tolist()
    for row in {0, len(starts) - 2}:
        num_nodes, prefix_length = starts[row + 1] - starts[row], case.prefix_lengths[row]
        if num_nodes == 0:
            continue
        k_CGE, v_CGE = (
            gather_pages(arguments[name], arguments["page_table_BP"][row], prefix_length + num_nodes)
            for name in ("k_cache_PSGE", "v_cache_PSGE")
        )
        for node in sorted({num_nodes * part // NUM_CHECKED_QUERIES for part in range(NUM_CHECKED_QUERIES)} | {num_nodes - 1}):
            seen_N = torch.arange(num_nodes, device=out_THE.device) <= node
            if arguments["visibility_BNN"] is not None:
                seen_N = arguments["visibility_BNN"][row, node, :num_nodes]
            seen_C = torch.cat([seen_N.new_ones(prefix_length), seen_N])
            token = starts[row] + node
            check_attention_row(
                out_THE[token],
                arguments["q_THE"][token],
                k_CGE[seen_C],
                v_CGE[seen_C],
                arguments["scale"],
                where=f"{case.name}: node {node} of sequence {row}",
            )


def variants(case: TreeAttentionCase, device: str) -> Sequence[Variant]:
    """List the kernel in use, its candidates, itself without a mask, and PyTorch's fused attentions."""
    from ddtree_bench.kernels.paged_triton import AttentionConfig
    from ddtree_bench.kernels.tree_attention import triton_kernel

    def configured(name: str) -> Variant:
        config = AttentionConfig(**CANDIDATES[name])
        return Variant(name=f"triton-{name}", run=lambda inputs: triton_kernel.tree_attention(**inputs.arguments, config=config))

    ours = Variant(name="triton", run=lambda inputs: triton_kernel.tree_attention(**inputs.arguments))
    if case not in BENCH_CASES:
        return [ours]
    causal = Variant(
        name="triton-causal",
        run=lambda inputs: triton_kernel.tree_attention(**inputs.arguments | {"visibility_BNN": None}),
        is_ours=False,
    )
    candidates = NARROW if case.num_nodes[0] * case.num_heads // case.num_kv_heads <= 80 else WIDE
    return [
        ours,
        *(configured(name) for name in candidates),
        causal,
        Variant(name="sdpa with a mask", run=_run_sdpa, is_ours=False),
        Variant(name="flex", run=_flex_runner(case), is_ours=False, is_capturable=False),
    ]


def _run_sdpa(inputs: Inputs) -> torch.Tensor:
    """Attend with the heads of a group packed as queries, so that keys are not repeated."""
    dense = inputs.dense
    return torch.nn.functional.scaled_dot_product_attention(
        dense["q"], dense["k"], dense["v"], attn_mask=dense["mask"], scale=inputs.arguments["scale"]
    )


def _flex_runner(case: TreeAttentionCase) -> Any:
    """Prepare FlexAttention with a block mask that lets it skip the mask inside the prefix."""
    compiled: dict[int, Any] = {}

    def prepare(inputs: Inputs) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        dense, visibility_BNN = inputs.dense, inputs.arguments["visibility_BNN"]
        prefix_length, group_size = case.prefix_lengths[0], case.num_heads // case.num_kv_heads

        def see(b: Any, h: Any, q: Any, kv: Any) -> Any:
            column = (kv - prefix_length).clamp(min=0)
            return (kv < prefix_length) | visibility_BNN[b, q // group_size, column]

        num_rows, num_keys = dense["q"].shape[2], dense["k"].shape[2]
        block_mask = create_block_mask(see, len(case.num_nodes), None, num_rows, num_keys, device=dense["q"].device)
        attend = torch.compile(flex_attention, dynamic=False)
        scale = inputs.arguments["scale"]
        return lambda: attend(dense["q"], dense["k"], dense["v"], block_mask=block_mask, scale=scale)

    def run(inputs: Inputs) -> torch.Tensor:
        if (len(case.num_nodes), case.prefix_lengths[0]) != (FLEX_BATCH, FLEX_CONTEXT):
            raise Unavailable(f"FlexAttention is compiled for batch {FLEX_BATCH} and context {FLEX_CONTEXT} only")
        if id(inputs) not in compiled:
            compiled[id(inputs)] = prepare(inputs)
        return compiled[id(inputs)]()

    return run


def cost(case: TreeAttentionCase) -> Cost:
    """Count keys, values, queries and mask read once, outputs written once, and the products of queries with all keys."""
    num_keys = sum(case.prefix_lengths) + sum(case.num_nodes)
    row_bytes = 2 * case.head_size
    pairs = sum(nodes * (prefix + nodes) for prefix, nodes in zip(case.prefix_lengths, case.num_nodes, strict=True))
    return Cost(
        num_bytes=2 * num_keys * case.num_kv_heads * row_bytes
        + 2 * sum(case.num_nodes) * case.num_heads * row_bytes
        + (sum(nodes * nodes for nodes in case.num_nodes) if case.window != "causal" else 0)
        + 4 * num_keys // case.page_size,
        num_flops=4 * case.num_heads * case.head_size * pairs,
    )


BENCH = OpBench(
    op="tree_attention",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
)
