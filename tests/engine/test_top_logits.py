"""The target's highest logit beside log-probabilities: raw, one a token, whatever the number of alternatives."""

from __future__ import annotations

import pytest
import torch

from ddtree_bench.engine.sampling import token_logprobs
from ddtree_bench.models.parallel import Parallel


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_top_logit_is_the_raw_maximum_of_each_row(num_top: int) -> None:
    logits_RV = torch.tensor([[2.0, 30.5, -1.0], [-4.0, -8.0, -6.0]])
    rows = token_logprobs(logits_RV, [0, 0], num_top, Parallel.single())
    assert [row.top_logit for row in rows] == [30.5, -4.0]
    assert rows[1].top_logit + rows[1].logprob == pytest.approx(-4.0 + float(logits_RV[1].log_softmax(0)[0]))
    assert [len(row.top) for row in rows] == [num_top, num_top]
