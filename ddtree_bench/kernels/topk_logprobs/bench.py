"""What `topk_logprobs` gives to the bench; the alternative is torch's logsumexp and topk.

Letters: R rows, V vocabulary, K candidates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddtree_bench.kernels.bench import Cost, OpBench, Variant
from ddtree_bench.kernels.topk_logprobs import reference
from ddtree_bench.kernels.topk_logprobs.cases import BENCH_CASES, TEST_CASES, TopkCase

_TEMPERATURE = 0.6
CONFIGS = {
    "tile-8192-8-warps": {"num_warps": 8},
    "tile-4096-4-warps": {"tile": 4096},
    "tile-16384-8-warps": {"tile": 16_384, "num_warps": 8},
    "pipelined-8192-4-warps": {"num_stages": 3, "programs_per_sm": 4},
    "select-2-warps": {"num_select_warps": 2},
    "select-8-warps": {"num_select_warps": 8},
}

Answer = tuple[torch.Tensor, torch.Tensor]


def make_inputs(case: TopkCase, seed: int, device: str) -> dict[str, Any]:
    """Draw bfloat16 logits."""
    logits_RV = case.make_logits(seed, dtype=torch.bfloat16, device=device)
    return {"logits_RV": logits_RV, "k": case.k, "temperature": _TEMPERATURE}


def check(case: TopkCase, inputs: dict[str, Any], run: Callable[[Any], Answer]) -> None:
    """Compare tokens with the reference exactly, log-probabilities with float64."""
    logits_RV, k = inputs["logits_RV"], inputs["k"]
    logprobs_RK, tokens_RK = run(inputs)
    partials = reference.topk_partials(logits_RV, k, vocab_offset=0, temperature=_TEMPERATURE)
    assert torch.equal(tokens_RK, partials.tokens_RK), f"{case.name}: tokens differ from the reference"
    is_real_RK = tokens_RK >= 0
    lse_R = torch.cat([torch.logsumexp(rows_RV.double() / _TEMPERATURE, dim=1) for rows_RV in logits_RV.split(64)])
    oracle_RK = partials.logits_RK.double() / _TEMPERATURE - lse_R[:, None]
    plain_RK = partials.logits_RK / _TEMPERATURE - partials.lse_R[:, None]
    rounding = torch.finfo(torch.float32).eps * float(oracle_RK[is_real_RK].abs().max())
    error, plain_error = (float((found_RK.double() - oracle_RK)[is_real_RK].abs().max()) for found_RK in (logprobs_RK, plain_RK))
    assert error <= 2 * plain_error + rounding, f"{case.name}: error {error:.2e}, of plain float32 {plain_error:.2e}"
    assert (logprobs_RK[~is_real_RK] == -torch.inf).all(), f"{case.name}: an empty place has a probability"


def variants(case: TopkCase, device: str) -> Sequence[Variant]:
    """List the kernels in their configurations, and torch."""
    from ddtree_bench.kernels.topk_logprobs import triton_kernel

    def configured(name: str, options: dict[str, int]) -> Variant:
        config = triton_kernel.TopkConfig(**options)
        return Variant(name=f"triton-{name}", run=lambda inputs: triton_kernel.topk_logprobs(**inputs, config=config))

    return [
        Variant(name="triton", run=lambda inputs: triton_kernel.topk_logprobs(**inputs)),
        *(configured(name, options) for name, options in CONFIGS.items()),
        Variant(name="triton-partials-merged", run=_partials_then_merge),
        Variant(name="torch logsumexp, topk", run=_torch, is_ours=False),
        Variant(name="torch softmax, topk", run=_torch_softmax, is_ours=False),
    ]


def _partials_then_merge(inputs: dict[str, Any]) -> Answer:
    """Take the two calls that a rank makes."""
    from ddtree_bench.kernels.topk_logprobs import triton_kernel

    temperature, k = inputs["temperature"], inputs["k"]
    partials = triton_kernel.topk_partials(inputs["logits_RV"], k, vocab_offset=0, temperature=temperature)
    gathered = (partials.logits_RK[None], partials.tokens_RK[None], partials.lse_R[None])
    return triton_kernel.merge_topk_partials(*gathered, k, temperature=temperature)


def _torch(inputs: dict[str, Any]) -> Answer:
    """Answer without the tie rule: topk on the raw logits, logsumexp in float32."""
    logits_RV, temperature = inputs["logits_RV"], inputs["temperature"]
    top = logits_RV.topk(inputs["k"], dim=1)
    lse_R = torch.logsumexp(logits_RV.float() / temperature, dim=1)
    return top.values.float() / temperature - lse_R[:, None], top.indices


def _torch_softmax(inputs: dict[str, Any]) -> Answer:
    """Answer by float32 log_softmax of everything, then topk."""
    logprobs_RV = torch.log_softmax(inputs["logits_RV"] / inputs["temperature"], dim=1, dtype=torch.float32)
    top = logprobs_RV.topk(inputs["k"], dim=1)
    return top.values, top.indices


def cost(case: TopkCase) -> Cost:
    """Count the logits read once and the table written once."""
    return Cost(num_bytes=case.num_rows * (case.vocab_size * 2 + case.k * (4 + 8)))


BENCH = OpBench(
    op="topk_logprobs",
    test_cases=TEST_CASES,
    bench_cases=BENCH_CASES,
    make_inputs=make_inputs,
    check=check,
    variants=variants,
    cost=cost,
    max_input_sets=40,
)
