"""`topk_logprobs`: order, ties, shards, padding, precision, refusals."""

import pytest
import torch

from ddtree_bench.kernels.topk_logprobs import merge_topk_partials, reference, topk_logprobs, topk_partials
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


def assert_kernel_equals_reference(logits_RV, k, temperature, assert_float_error, **options):
    """Tokens and raw logits exactly, the log-sum-exp against float64."""
    from ddtree_bench.kernels.topk_logprobs import triton_kernel

    config = triton_kernel.TopkConfig(**options)
    found = triton_kernel.topk_partials(logits_RV, k, vocab_offset=30, temperature=temperature, config=config)
    expected = reference.topk_partials(logits_RV, k, vocab_offset=30, temperature=temperature)
    assert found.tokens_RK.tolist() == expected.tokens_RK.tolist()
    assert found.logits_RK.tolist() == expected.logits_RK.tolist()
    is_known_R = expected.lse_R.isfinite()
    assert found.lse_R[~is_known_R].tolist() == expected.lse_R[~is_known_R].tolist()
    oracle_R = torch.logsumexp(logits_RV.double().nan_to_num(nan=-INF, posinf=INF, neginf=-INF) / temperature, dim=1)
    if is_known_R.any():
        assert_float_error(found.lse_R[is_known_R], expected.lse_R[is_known_R], oracle_R[is_known_R])

    logprobs_RK, tokens_RK = triton_kernel.topk_logprobs(logits_RV, k, temperature=temperature, config=config)
    assert (tokens_RK + 30 * (tokens_RK >= 0)).tolist() == expected.tokens_RK.tolist()
    assert not (logprobs_RK > 0).any()
    assert not (logprobs_RK[:, 1:] > logprobs_RK[:, :-1]).any()
    assert torch.equal(logprobs_RK == -INF, tokens_RK < 0)


@pytest.mark.parametrize("case", TEST_CASES[:-1], ids=IDS[:-1])
def test_kernel(case, kernel_device, assert_float_error):
    logits_RV = case.make_logits(seed=23, dtype=torch.bfloat16, device=kernel_device)
    assert_kernel_equals_reference(logits_RV, case.k, 0.6, assert_float_error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", [TEST_CASES[1], TEST_CASES[3]], ids=["k-beyond-vocab", "ties"])
def test_kernel_of_wider_keys(case, dtype, kernel_device, assert_float_error):
    logits_RV = case.make_logits(seed=23, dtype=dtype, device=kernel_device)
    assert_kernel_equals_reference(logits_RV, case.k, 0.6, assert_float_error)


def test_kernel_over_several_tiles(kernel_device, assert_float_error):
    """Tiles of 256 ids, k at its most, all of the best in one group, and then ties over the whole row."""
    logits_RV = TEST_CASES[-1].make_logits(seed=24, device=kernel_device)[:2]
    logits_RV[0, 4100:4164] += 50
    logits_RV[1] = logits_RV[1].round()
    assert_kernel_equals_reference(logits_RV, 64, 1.0, assert_float_error, tile=512, num_stages=2)
    assert_kernel_equals_reference(logits_RV.bfloat16(), 64, 1.0, assert_float_error)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy, which warns of NaN
def test_kernel_ignores_nan_and_minus_infinity(kernel_device, assert_float_error):
    logits_RV = torch.randn(5, 700, generator=torch.Generator().manual_seed(25))
    logits_RV[0, ::3] = NAN
    logits_RV[1, 1:] = -INF
    logits_RV[2] = NAN
    logits_RV[3] = -INF
    logits_RV[4, 40:] = torch.where(torch.arange(660) % 2 == 0, NAN, -INF)
    for dtype in (torch.float32, torch.bfloat16):
        assert_kernel_equals_reference(logits_RV.to(kernel_device, dtype), 50, 0.7, assert_float_error)


def test_kernel_reads_rows_that_are_not_contiguous(kernel_device, assert_float_error):
    """As a slice of a padded vocabulary; what lies beside it is NaN."""
    padded = torch.full((3, 330), NAN, device=kernel_device)
    padded[:, :301] = torch.randn(3, 301, generator=torch.Generator().manual_seed(26)).to(kernel_device)
    assert_kernel_equals_reference(padded[:, :301], 7, 1.0, assert_float_error)
    assert_kernel_equals_reference(padded[:, :301].t().contiguous().t(), 7, 1.0, assert_float_error)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("case", [TEST_CASES[1], TEST_CASES[3]], ids=["k-beyond-vocab", "ties"])
def test_kernel_merges_ranks(case, num_ranks, kernel_device):
    from ddtree_bench.kernels.topk_logprobs import triton_kernel

    logits_RV = case.make_logits(seed=27, device=kernel_device)
    logits_RV[0, 0] = NAN
    width = -(-logits_RV.shape[1] // num_ranks)
    parts = [
        reference.topk_partials(shard_RV, case.k, vocab_offset=rank * width, temperature=0.6)
        for rank, shard_RV in enumerate(logits_RV.split(width, dim=1))
    ]
    gathered = [torch.stack([getattr(part, name) for part in parts]) for name in ("logits_RK", "tokens_RK", "lse_R")]
    logprobs_RK, tokens_RK = triton_kernel.merge_topk_partials(*gathered, case.k, temperature=0.6)
    expected_logprobs_RK, expected_tokens_RK = reference.merge_topk_partials(*gathered, case.k, temperature=0.6)
    assert tokens_RK.tolist() == expected_tokens_RK.tolist()
    torch.testing.assert_close(logprobs_RK, expected_logprobs_RK, rtol=1e-6, atol=2e-6)
    assert (logprobs_RK <= 0).all()
