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
