"""The target's own choice at every node: argmax, or one sample of its adjusted distribution.

Order: penalties, temperature, top-k, top-p, min-p, then Gumbel-max with noise keyed by position (`noise`), so that a
choice does not depend on the mode that asked for it. The vocabulary is sharded; ranks exchange one best score a row,
and whole rows only where a filter or log-probabilities need them.

Letters: B sequences, N nodes (1 after a prefill), R rows, V vocabulary ids of this shard, W whole vocabulary, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree_bench.engine.noise import gumbel_noise
from ddtree_bench.engine.penalties import TokenHistory, penalise
from ddtree_bench.engine.request import SamplingParams, TokenLogprob
from ddtree_bench.kernels.argmax_merge import local_argmax, merge_argmax
from ddtree_bench.models.parallel import Parallel

# Below this a temperature is the argmax: dividing by it would overflow before it changed a choice.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class ChoiceBatch:
    """What the choices at the nodes of a batch depend on beside the logits.

    Args:
        samplings: one a sequence.
        histories: one a sequence; None where it has no penalties.
        positions_BN: int64, absolute position of the token to be chosen after each node.
        tokens_BN: int64, tokens of the nodes.
        visibility_BNN: bool, ancestor or self; None where every tree is its root.
    """

    samplings: Sequence[SamplingParams]
    histories: Sequence[TokenHistory | None]
    positions_BN: torch.Tensor
    tokens_BN: torch.Tensor
    visibility_BNN: torch.Tensor | None


def choose_tokens(logits_BNV: torch.Tensor, batch: ChoiceBatch, parallel: Parallel, vocab_offset: int) -> torch.Tensor:
    """Return the target's choice after each node, int64 [B, N]; −1 where no token has a probability.

    Args:
        logits_BNV: float32, this rank's shard; not changed.
        batch: what else counts.
        parallel: the ranks that hold the other shards.
        vocab_offset: global id of the shard's first token.
    """
    scores_BNV = _penalised(logits_BNV, batch)
    sampled = [b for b, sampling in enumerate(batch.samplings) if sampling.temperature >= GREEDY_BELOW]
    if sampled:
        scores_BNV = scores_BNV.index_copy(
            0,
            torch.tensor(sampled, device=scores_BNV.device),
            _sample_scores(scores_BNV, sampled, batch, parallel, vocab_offset),
        )
    return argmax_over_ranks(scores_BNV.flatten(0, 1), parallel, vocab_offset).view(batch.positions_BN.shape)


def argmax_over_ranks(scores_RV: torch.Tensor, parallel: Parallel, vocab_offset: int) -> torch.Tensor:
    """Return the token of each row's highest score over all shards, the lowest id among equals."""
    value_R, token_R = local_argmax(scores_RV, vocab_offset)
    if parallel.world_size == 1:
        return token_R
    packed_12R = torch.stack([value_R.view(torch.int32).long(), token_R])[None]
    packed_W2R = parallel.all_gather(packed_12R, dim=0)
    return merge_argmax(packed_W2R[:, 0].int().view(torch.float32), packed_W2R[:, 1].contiguous())


def token_logprobs(logits_RV: torch.Tensor, tokens: Sequence[int], num_top: int, parallel: Parallel) -> tuple[TokenLogprob, ...]:
    """Return log-probabilities of emitted tokens from the target's plain log-softmax.

    Args:
        logits_RV: float32 shard of the rows that chose the tokens.
        tokens: R global ids.
        num_top: best alternatives to report with each.
    """
    logits_RW = parallel.all_gather(logits_RV, dim=-1)
    logprobs_RW, top_logits = logits_RW.log_softmax(-1), logits_RW.amax(1).tolist()
    own = logprobs_RW.gather(1, torch.tensor(tokens, device=logprobs_RW.device)[:, None])[:, 0].tolist()
    top = torch.topk(logprobs_RW, min(num_top, logprobs_RW.shape[1]), dim=1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return tuple(
        TokenLogprob(token=token, logprob=logprob, top=tuple(zip(row_ids, row_values, strict=True)), top_logit=top_logit)
        for token, logprob, row_ids, row_values, top_logit in zip(tokens, own, ids, values, top_logits, strict=True)
    )


def _penalised(logits_BNV: torch.Tensor, batch: ChoiceBatch) -> torch.Tensor:
    if not any(sampling.has_penalties for sampling in batch.samplings):
        return logits_BNV
    scores_BNV = logits_BNV.clone()
    root_only_NN = torch.ones(1, 1, dtype=torch.bool, device=logits_BNV.device)
    for b, sampling in enumerate(batch.samplings):
        if sampling.has_penalties:
            history = batch.histories[b]
            assert history is not None, "a sequence with penalties has a history"
            visibility_NN = root_only_NN if batch.visibility_BNN is None else batch.visibility_BNN[b]
            scores_BNV[b] = penalise(logits_BNV[b], sampling, history, batch.tokens_BN[b, 1:], visibility_NN)
    return scores_BNV


def _sample_scores(
    scores_BNV: torch.Tensor, sampled: Sequence[int], batch: ChoiceBatch, parallel: Parallel, vocab_offset: int
) -> torch.Tensor:
    """Return log p + noise, up to a constant a row, of the sequences in `sampled`."""
    samplings = [batch.samplings[b] for b in sampled]
    temperatures_B = torch.tensor([sampling.temperature for sampling in samplings], device=scores_BNV.device)
    chosen_BNV = scores_BNV[list(sampled)] / temperatures_B[:, None, None]
    filtered = [i for i, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1 or s.min_p > 0]
    num_local = chosen_BNV.shape[-1]
    if filtered:
        whole_BNW = parallel.all_gather(chosen_BNV[filtered], dim=-1)
        for i, whole_NW in zip(filtered, whole_BNW, strict=True):
            keep_NW = allowed_tokens(whole_NW, samplings[i])
            chosen_BNV[i].masked_fill_(~keep_NW[:, vocab_offset : vocab_offset + num_local], -torch.inf)
    seeds = [sampling.seed for sampling in samplings]
    return chosen_BNV + gumbel_noise(seeds, batch.positions_BN[list(sampled)], vocab_offset, num_local)


def allowed_tokens(scaled_RW: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return which tokens top-k, top-p and min-p leave, in this order; the best token always stays.

    Args:
        scaled_RW: float32 logits after temperature, whole vocabulary; equal logits rank by lower id.

    Returns:
        keep_RW: bool.
    """
    ordered = torch.sort(scaled_RW, dim=-1, descending=True, stable=True)
    values_RW = ordered.values
    ranks_W = torch.arange(values_RW.shape[1], device=values_RW.device)
    if sampling.top_k > 0:
        values_RW = values_RW.masked_fill(ranks_W >= sampling.top_k, -torch.inf)
    probabilities_RW = values_RW.softmax(-1)
    keep_RW = values_RW > -torch.inf
    if sampling.top_p < 1:
        # A token stays while those before it do not reach top_p yet.
        keep_RW &= probabilities_RW.cumsum(-1) - probabilities_RW < sampling.top_p
    if sampling.min_p > 0:
        keep_RW &= probabilities_RW >= sampling.min_p * probabilities_RW[:, :1]
    return torch.zeros_like(keep_RW).scatter_(1, ordered.indices, keep_RW)
