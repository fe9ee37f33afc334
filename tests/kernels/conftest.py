"""Oracles that several operations' tests share."""

import pytest
import torch


def dense_attention(q_HE, k_CGE, v_CGE, scale, *, dtype):
    """Attend one query to all given keys, the plain way, in one dtype throughout."""
    num_groups = q_HE.shape[0] // k_CGE.shape[1]
    k_CHE, v_CHE = (x.to(dtype).repeat_interleave(num_groups, dim=1) for x in (k_CGE, v_CGE))
    scores_HC = torch.einsum("he,che->hc", q_HE.to(dtype), k_CHE) * scale
    return torch.einsum("hc,che->he", scores_HC.softmax(-1), v_CHE)


def rows_of(cache_PSGE, pages, positions):
    """Read logical positions of one sequence, slot by slot."""
    page_size = cache_PSGE.shape[1]
    rows = [cache_PSGE[pages[position // page_size], position % page_size] for position in positions]
    return torch.stack(rows) if rows else cache_PSGE.new_empty(0, *cache_PSGE.shape[2:])


def check_float_error(out, plain, oracle):
    """Allow twice the error of a plain computation in the same dtype plus one rounding step."""
    rounding = torch.finfo(out.dtype).eps * float(oracle.abs().max())
    error = float((out.double() - oracle).abs().max())
    assert error <= 2 * float((plain.double() - oracle).abs().max()) + rounding


@pytest.fixture
def attention_oracle():
    return dense_attention


@pytest.fixture
def read_rows():
    return rows_of


@pytest.fixture
def assert_float_error():
    return check_float_error
