"""`argmax_merge`: ties, shards, nothing to choose, refusals."""

import pytest
import torch

from ddtree_bench.kernels.argmax_merge import local_argmax, merge_argmax
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
