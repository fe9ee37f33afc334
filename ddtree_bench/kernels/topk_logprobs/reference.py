"""Reference of `topk_logprobs` in torch.

Letters: R rows, V vocabulary ids of this shard, C candidates to choose from, K candidates, W ranks.
"""

import torch

from ddtree_bench.kernels.topk_logprobs.partials import TopkPartials

_LARGEST_TOKEN = 2**31 - 1


def topk_partials(logits_RV: torch.Tensor, k: int, *, vocab_offset: int, temperature: float) -> TopkPartials:
    """Answer `ddtree_bench.kernels.topk_logprobs.topk_partials`."""
    finite_RV = _nan_to_minus_infinity(logits_RV.float())
    tokens_V = torch.arange(vocab_offset, vocab_offset + logits_RV.shape[1], device=logits_RV.device)
    logits_RK, tokens_RK = _select(finite_RV, tokens_V.expand_as(finite_RV), min(k, logits_RV.shape[1]))
    num_missing = k - logits_RK.shape[1]
    return TopkPartials(
        logits_RK=torch.nn.functional.pad(logits_RK, (0, num_missing), value=-torch.inf),
        tokens_RK=torch.nn.functional.pad(tokens_RK, (0, num_missing), value=-1),
        lse_R=torch.logsumexp(finite_RV / temperature, dim=1),
    )


def merge_topk_partials(
    logits_WRK: torch.Tensor, tokens_WRK: torch.Tensor, lse_WR: torch.Tensor, k: int, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer `ddtree_bench.kernels.topk_logprobs.merge_topk_partials`."""
    logits_RC = _nan_to_minus_infinity(logits_WRK.transpose(0, 1).flatten(1))
    tokens_RC = tokens_WRK.transpose(0, 1).flatten(1)
    logits_RK, tokens_RK = _select(logits_RC, tokens_RC, k)
    lse_R = torch.logsumexp(lse_WR, dim=0)
    logprobs_RK = logits_RK / temperature - lse_R[:, None]
    return torch.where(tokens_RK < 0, -torch.inf, logprobs_RK), tokens_RK


def _nan_to_minus_infinity(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _select(logits_RC: torch.Tensor, tokens_RC: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the k best by logit, then by lower token id; −inf becomes token −1."""
    # torch.topk promises no order among equals: where equals straddle the last place, its choice is not ours.
    top = logits_RC.topk(k, dim=1)
    if ((logits_RC >= top.values[:, -1:]).sum(1) > k).any():
        places_RK = _keys(logits_RC, tokens_RC).topk(k, dim=1).indices
    else:
        places_RK = top.indices
        best_first_RK = _keys(logits_RC.gather(1, places_RK), tokens_RC.gather(1, places_RK)).argsort(dim=1, descending=True)
        places_RK = places_RK.gather(1, best_first_RK)
    logits_RK = logits_RC.gather(1, places_RK)
    return logits_RK, torch.where(logits_RK == -torch.inf, -1, tokens_RC.gather(1, places_RK))


def _keys(logits_RC: torch.Tensor, tokens_RC: torch.Tensor) -> torch.Tensor:
    """Make one integer of each logit and token id that ascends as candidates get better."""
    # Adding 0 turns −0 into +0; flipping the low bits of negative floats makes their bit patterns ascend.
    bits_RC = (logits_RC + 0.0).view(torch.int32)
    ascending_RC = torch.where(bits_RC < 0, bits_RC ^ 0x7FFFFFFF, bits_RC)
    return ascending_RC.long() * 2**32 + (_LARGEST_TOKEN - tokens_RC)
