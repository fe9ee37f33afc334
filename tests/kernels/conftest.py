"""Oracles that several operations' tests share, and where their kernels run.

Without a GPU the kernels run through Triton's interpreter, which must be asked for before triton is imported the first
time: nothing of the package imports triton before a kernel is used, and this file is read before any test runs.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


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


@pytest.fixture(scope="session")
def kernel_device():
    """Name the device that Triton kernels run on: the GPU, or the CPU through the interpreter."""
    if torch.cuda.is_available():
        return "cuda"
    assert os.environ.get("TRITON_INTERPRET") == "1", (
        "triton was imported before tests/kernels/conftest.py asked for its interpreter"
    )
    return "cpu"
