"""`topk_logprobs`: order, ties, shards, padding, precision, refusals."""

import pytest
import torch

from ddtree_bench.kernels.topk_logprobs import merge_topk_partials, topk_logprobs, topk_partials
from ddtree_bench.kernels.topk_logprobs.cases import TEST_CASES

IDS = [case.name for case in TEST_CASES]
INF = float("inf")
NAN = float("nan")


def oracle_tokens(logits_V, k):
    """Sort one row in Python by the rule: logit, then lower id; NaN and −inf are no candidates."""
    finite = [(-value, token) for token, value in enumerate(logits_V.float().tolist()) if value > -INF]
    tokens = [token for _, token in sorted(finite)[:k]]
    return tokens + [-1] * (k - len(tokens))


def merged_over(logits_RV, k, num_ranks, temperature=1.0):
    """Shard the padded vocabulary over ranks, take partials, merge."""
    width = -(-logits_RV.shape[1] // num_ranks)
    padded_RV = torch.nn.functional.pad(logits_RV, (0, width * num_ranks - logits_RV.shape[1]), value=-INF)
    parts = [
        topk_partials(shard_RV, k, vocab_offset=rank * width, temperature=temperature)
        for rank, shard_RV in enumerate(padded_RV.split(width, dim=1))
    ]
    gathered = [torch.stack([getattr(part, name) for part in parts]) for name in ("logits_RK", "tokens_RK", "lse_R")]
    return merge_topk_partials(*gathered, k, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("case", TEST_CASES, ids=IDS)
def test_whole_vocabulary(case, temperature, dtype, assert_float_error):
    logits_RV = case.make_logits(seed=21, dtype=dtype)
    logprobs_RK, tokens_RK = topk_logprobs(logits_RV, case.k, temperature=temperature)
    assert tokens_RK.tolist() == [oracle_tokens(row, case.k) for row in logits_RV]
    assert (logprobs_RK.dtype, tokens_RK.dtype) == (torch.float32, torch.int64)
    assert (logprobs_RK <= 0).all()
    assert (logprobs_RK[:, 1:] <= logprobs_RK[:, :-1]).all()

    is_real_RK = tokens_RK >= 0
    assert (logprobs_RK[~is_real_RK] == -INF).all()
    places_RK = tokens_RK.clamp(min=0)
    oracle_RK = (logits_RV.double() / temperature).log_softmax(-1).gather(1, places_RK)
    plain_RK = (logits_RV.float() / temperature).log_softmax(-1).gather(1, places_RK)
    assert_float_error(logprobs_RK[is_real_RK], plain_RK[is_real_RK], oracle_RK[is_real_RK])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("case", TEST_CASES, ids=IDS)
def test_merged_shards_equal_the_whole_vocabulary(case, num_ranks):
    logits_RV = case.make_logits(seed=22)
    expected_logprobs_RK, expected_tokens_RK = topk_logprobs(logits_RV, case.k)
    logprobs_RK, tokens_RK = merged_over(logits_RV, case.k, num_ranks)
    assert torch.equal(tokens_RK, expected_tokens_RK)
    torch.testing.assert_close(logprobs_RK, expected_logprobs_RK, rtol=1e-6, atol=2e-6)
    assert (logprobs_RK <= 0).all()


def test_duplicates_that_straddle_shards_take_the_lowest_global_ids():
    logits_RV = torch.full((1, 12), -5.0)
    logits_RV[0, [3, 4, 7, 8, 11]] = 2.0
    for num_ranks in (1, 2, 3, 4, 5, 6, 12):
        assert merged_over(logits_RV, 4, num_ranks)[1].tolist() == [[3, 4, 7, 8]]


def test_ids_are_global_not_local():
    logits_RV = torch.zeros(1, 40)
    logits_RV[0, 33] = 9.0
    assert merged_over(logits_RV, 1, 4)[1].tolist() == [[33]]


def test_positive_and_negative_zero_tie():
    assert topk_logprobs(torch.tensor([[-0.0, 0.0, -0.0, -1.0]]), 3)[1].tolist() == [[0, 1, 2]]


def test_nan_and_minus_infinity_are_never_selected():
    logits_RV = torch.tensor([[NAN, 1.0, -INF, 1.0], [NAN, NAN, -INF, NAN], [-INF, -2.0, -3.0, NAN]])
    for num_ranks in (1, 2, 3):
        logprobs_RK, tokens_RK = merged_over(logits_RV, 3, num_ranks)
        assert tokens_RK.tolist() == [[1, 3, -1], [-1, -1, -1], [1, 2, -1]]
        assert torch.equal(logprobs_RK == -INF, tokens_RK == -1)
        torch.testing.assert_close(logprobs_RK[0, :2], torch.full((2,), 0.5).log())


def test_temperature_leaves_raw_logits_and_order():
    logits_RV = torch.tensor([[1.0, 3.0, 2.0]])
    cold, warm = (topk_partials(logits_RV, 3, vocab_offset=10, temperature=temperature) for temperature in (0.5, 1.0))
    assert cold.logits_RK.tolist() == warm.logits_RK.tolist() == [[3.0, 2.0, 1.0]]
    assert cold.tokens_RK.tolist() == warm.tokens_RK.tolist() == [[11, 12, 10]]
    torch.testing.assert_close(cold.lse_R, torch.logsumexp(logits_RV / 0.5, dim=1))


def test_no_rows():
    logprobs_RK, tokens_RK = topk_logprobs(torch.empty(0, 9), 4)
    assert logprobs_RK.shape == tokens_RK.shape == (0, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: topk_logprobs(torch.zeros(3), 1), ValueError, r"logits_RV must have shape \(any, any\), got \(3,\)"),
        (lambda: topk_logprobs(torch.zeros(2, 0), 1), ValueError, r"at least one column, got shape \(2, 0\)"),
        (lambda: topk_logprobs(torch.zeros(1, 3).long(), 1), TypeError, r"logits_RV must be float32 or .*, got int64"),
        (lambda: topk_logprobs([[0.0]], 1), TypeError, r"logits_RV must be a torch.Tensor, got list"),
        (lambda: topk_logprobs(torch.zeros(1, 3), 0), ValueError, r"k must be at least 1, got 0"),
        (lambda: topk_logprobs(torch.zeros(1, 3), 1, temperature=0.0), ValueError, r"temperature must be a positive .* got 0.0"),
        (lambda: topk_partials(torch.zeros(1, 3), 1, vocab_offset=-1), ValueError, r"vocab_offset must be at least 0, got -1"),
        (
            lambda: merge_topk_partials(torch.zeros(2, 1, 3), torch.zeros(2, 1, 3).long(), torch.zeros(2, 1), 7),
            ValueError,
            r"k must be at most the 6 gathered candidates, got 7",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
