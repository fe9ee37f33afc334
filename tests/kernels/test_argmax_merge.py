"""`argmax_merge`: ties, shards, nothing to choose, refusals."""

import pytest
import torch

from ddtree_bench.kernels.argmax_merge import local_argmax, merge_argmax, reference
from ddtree_bench.kernels.argmax_merge.cases import TEST_CASES

INF = float("inf")
NAN = float("nan")


def merged_over(scores_RV, num_ranks):
    width = -(-scores_RV.shape[1] // num_ranks)
    padded_RV = torch.nn.functional.pad(scores_RV, (0, width * num_ranks - scores_RV.shape[1]), value=-INF)
    choices = [local_argmax(shard_RV, rank * width) for rank, shard_RV in enumerate(padded_RV.split(width, dim=1))]
    return merge_argmax(torch.stack([value for value, _ in choices]), torch.stack([token for _, token in choices]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_merged_shards_choose_the_lowest_of_the_best(case, num_ranks, dtype):
    scores_RV = case.make_scores(seed=31, dtype=dtype)
    expected = [row.index(max(row)) for row in scores_RV.tolist()]
    assert merged_over(scores_RV, num_ranks).tolist() == expected


def test_local_choice_is_a_global_id_and_a_float32_score():
    value_R, token_R = local_argmax(torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.bfloat16), 30)
    assert (value_R.tolist(), token_R.tolist()) == ([2.0], [31])
    assert (value_R.dtype, token_R.dtype) == (torch.float32, torch.int64)


def test_merge_does_not_depend_on_the_order_of_ranks():
    value_WR, token_WR = torch.tensor([[1.0], [3.0], [3.0]]), torch.tensor([[0], [20], [10]])
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        assert merge_argmax(value_WR[order], token_WR[order]).tolist() == [10]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_nan_and_minus_infinity_are_never_chosen(num_ranks):
    scores_RV = torch.tensor([[NAN, -INF, -4.0, NAN], [NAN, -INF, NAN, -INF]])
    assert merged_over(scores_RV, num_ranks).tolist() == [2, -1]


def test_refusals():
    with pytest.raises(ValueError, match=r"at least one column, got shape \(2, 0\)"):
        local_argmax(torch.zeros(2, 0), 0)
    with pytest.raises(TypeError, match=r"token_WR must be int64, got int32"):
        merge_argmax(torch.zeros(2, 1), torch.zeros(2, 1).int())
    with pytest.raises(ValueError, match=r"token_WR must have shape \(2, 1\), got \(1, 1\)"):
        merge_argmax(torch.zeros(2, 1), torch.zeros(1, 1).long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", [64, 4096])
@pytest.mark.parametrize("case", TEST_CASES, ids=[case.name for case in TEST_CASES])
def test_kernel(case, block, dtype, kernel_device):
    from ddtree_bench.kernels.argmax_merge import triton_kernel

    scores_RV = case.make_scores(seed=32, dtype=dtype, device=kernel_device)
    value_R, token_R = triton_kernel.local_argmax(scores_RV, 77, block=block)
    expected_value_R, expected_token_R = reference.local_argmax(scores_RV, 77)
    assert (value_R.dtype, token_R.dtype) == (torch.float32, torch.int64)
    assert (value_R.tolist(), token_R.tolist()) == (expected_value_R.tolist(), expected_token_R.tolist())


def test_kernel_never_chooses_nan_or_minus_infinity(kernel_device):
    from ddtree_bench.kernels.argmax_merge import triton_kernel

    rows = [[NAN, -INF, -4.0, NAN, -4.0], [NAN, -INF, NAN, -INF, NAN], [-0.0, 0.0, -1.0, NAN, 0.0], [1.0, INF, INF, NAN, 2.0]]
    scores_RV = torch.tensor(rows, device=kernel_device)
    value_R, token_R = triton_kernel.local_argmax(scores_RV[:, ::1], 10)
    assert value_R.tolist() == [-4.0, -INF, 0.0, INF]
    assert token_R.tolist() == [12, -1, 10, 11]


def test_kernel_merges_ranks(kernel_device):
    from ddtree_bench.kernels.argmax_merge import triton_kernel

    values = [[1.0, NAN, -INF, 2.0, NAN], [3.0, 0.5, -INF, 2.0, NAN], [3.0, NAN, NAN, 1.0, NAN]]
    tokens = [[0, -1, -1, 8, 3], [20, 12, -1, 5, 2], [10, -1, -1, 3, 1]]
    value_WR, token_WR = torch.tensor(values, device=kernel_device), torch.tensor(tokens, device=kernel_device)
    assert triton_kernel.merge_argmax(value_WR, token_WR).tolist() == [10, 12, -1, 5, -1]
    assert reference.merge_argmax(value_WR, token_WR).tolist() == [10, 12, -1, 5, -1]
