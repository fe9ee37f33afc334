"""`block_attention`: against a query-by-query oracle on caches whose unwritten slots are NaN; independence of the batch."""

import pytest
import torch

from ddtree_bench.kernels.block_attention import block_attention
from ddtree_bench.kernels.block_attention.cases import TEST_CASES


def by_query(inputs, attend_one, read_rows, dtype):
    """Attend each query to its context, read slot by slot, and to its whole block."""
    out_THE = torch.zeros(inputs["q_THE"].shape, dtype=dtype)
    starts = inputs["query_starts_B1"].tolist()
    for row, context_length in enumerate(inputs["context_lengths_B"].tolist()):
        block = slice(starts[row], starts[row + 1])
        k_CGE, v_CGE = (
            torch.cat([read_rows(inputs[cache], inputs["page_table_BP"][row], range(context_length)), inputs[own][block]])
            for cache, own in (("k_cache_PSGE", "k_TGE"), ("v_cache_PSGE", "v_TGE"))
        )
        for token in range(starts[row], starts[row + 1]):
            out_THE[token] = attend_one(inputs["q_THE"][token], k_CGE, v_CGE, inputs["scale"], dtype=dtype)
    return out_THE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_against_float64(case, dtype, attention_oracle, read_rows, assert_float_error):
    inputs = case.make_inputs(seed=71, dtype=dtype)
    out_THE = block_attention(**inputs)
    assert out_THE.dtype == dtype
    oracle_THE = by_query(inputs, attention_oracle, read_rows, torch.float64)
    assert_float_error(out_THE, by_query(inputs, attention_oracle, read_rows, dtype), oracle_THE)


@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_a_sequence_does_not_depend_on_its_batch(case):
    inputs = case.make_inputs(seed=72)
    out_THE = block_attention(**inputs)
    starts = inputs["query_starts_B1"].tolist()
    for row in range(len(starts) - 1):
        start, end = starts[row], starts[row + 1]
        alone = inputs | {name: inputs[name][start:end] for name in ("q_THE", "k_TGE", "v_TGE")}
        alone |= {name: inputs[name][row : row + 1] for name in ("page_table_BP", "context_lengths_B")}
        alone["query_starts_B1"] = torch.tensor([0, end - start], dtype=torch.int32)
        assert torch.equal(block_attention(**alone), out_THE[start:end])


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("q_THE", lambda q: q[:, :3], ValueError, r"a multiple of the 2 heads of k_TGE, got 3"),
        ("k_TGE", lambda k: k[1:], ValueError, r"k_TGE must have shape \(24, any, 16\), got \(23, 2, 16\)"),
        ("k_cache_PSGE", lambda k: k[:, :, :1], ValueError, r"k_cache_PSGE must have shape \(any, any, 2, 16\)"),
        ("v_TGE", lambda v: v.double(), TypeError, r"v_TGE must be float32, got float64"),
        ("context_lengths_B", lambda n: n.float(), TypeError, r"context_lengths_B must be int32 or int64, got float32"),
        ("page_table_BP", lambda table: table[:, :2], ValueError, r"page_table_BP must hold the 3 pages of 12 slots"),
    ],
)
def test_refusals(name, change, error, message):
    inputs = TEST_CASES[1].make_inputs(seed=73)
    with pytest.raises(error, match=message):
        block_attention(**inputs | {name: change(inputs[name])})


# The interpreter multiplies bfloat16 as integers, so without a GPU float16 stands for the 16-bit types.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# Small blocks, and splits of one block, let short windows reach every branch of the kernel.
TRITON_CONFIGS = {
    "float32": (torch.float32, {}),
    "half": (HALF, {}),
    "half-one-split": (HALF, {"block_m": 16, "block_n": 16, "num_splits": 1}),
    "half-three-splits": (HALF, {"block_m": 16, "block_n": 16, "num_splits": 3}),
}


def run_triton(inputs, device, **options):
    """Run the Triton implementation on a device, the tile sizes given or chosen, and return the output on the CPU."""
    from ddtree_bench.kernels.block_attention import triton_kernel
    from ddtree_bench.kernels.paged_triton import AttentionConfig

    num_splits = options.pop("num_splits", None)
    config = AttentionConfig(min_blocks=1, **options) if options else None
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return triton_kernel.block_attention(**placed, config=config, num_splits=num_splits).cpu()


@pytest.mark.parametrize(("dtype", "options"), TRITON_CONFIGS.values(), ids=TRITON_CONFIGS)
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_triton_against_float64(case, dtype, options, kernel_device, attention_oracle, read_rows, assert_float_error):
    inputs = case.make_inputs(seed=91, dtype=dtype)
    out_THE = run_triton(inputs, kernel_device, **options)
    assert out_THE.dtype == dtype
    oracle_THE = by_query(inputs, attention_oracle, read_rows, torch.float64)
    assert_float_error(out_THE, by_query(inputs, attention_oracle, read_rows, dtype), oracle_THE)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_triton_clears_rows_beyond_the_last_sequence(num_splits, kernel_device):
    inputs = TEST_CASES[2].make_inputs(seed=92)
    out_THE = run_triton(inputs, kernel_device, block_m=16, block_n=16, num_splits=num_splits)
    longer = {
        name: torch.cat([inputs[name], torch.full_like(inputs[name][:2], torch.nan)]) for name in ("q_THE", "k_TGE", "v_TGE")
    }
    longer_out_THE = run_triton(inputs | longer, kernel_device, block_m=16, block_n=16, num_splits=num_splits)
    assert torch.equal(longer_out_THE[:-2], out_THE)
    assert (longer_out_THE[-2:] == 0).all()
