"""Read and check the drafter's table of candidates.

Letters: D draft depths, K candidates of a depth.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Hold the selectable candidates of each depth, best first, as plain Python numbers.

    The rows end before the first depth that has nothing to select, since no node can be deeper.
    """

    logprobs: list[list[float]]
    tokens: list[list[int]]


def read_candidates(topk_logprobs_DK: np.ndarray, topk_tokens_DK: np.ndarray, depth: int | None) -> Candidates:
    """Check the first `depth` rows of the table and drop what can never be selected (NaN and −inf).

    Raises:
        TypeError: the log-probabilities are not floats, or the tokens not integers.
        ValueError: the shapes are not one [D, K], or a row breaks the rules of `build_ddtree_tree_from_topk`.
    """
    logprobs_DK, tokens_DK = np.asarray(topk_logprobs_DK), np.asarray(topk_tokens_DK)
    if logprobs_DK.dtype.kind != "f":
        raise TypeError(f"topk_logprobs_DK must hold floats, got {logprobs_DK.dtype}; pass log-probabilities")
    if tokens_DK.dtype.kind not in "iu":
        raise TypeError(f"topk_tokens_DK must hold integers, got {tokens_DK.dtype}; pass token ids")
    if logprobs_DK.ndim != 2 or logprobs_DK.shape != tokens_DK.shape:
        raise ValueError(
            f"topk_logprobs_DK and topk_tokens_DK must have one shape [D, K], got {logprobs_DK.shape} "
            f"and {tokens_DK.shape}; pass one row a depth"
        )
    logprobs_DK = logprobs_DK.astype(np.float32, copy=False)
    if depth is not None:
        logprobs_DK, tokens_DK = logprobs_DK[:depth], tokens_DK[:depth]
    is_selectable_DK = ~(np.isnan(logprobs_DK) | np.isneginf(logprobs_DK))
    logprobs, tokens = logprobs_DK.tolist(), tokens_DK.tolist()
    if not is_selectable_DK.all():
        keep = is_selectable_DK.tolist()
        logprobs, tokens = _select(logprobs, keep), _select(tokens, keep)
    for row, (logprob_row, token_row) in enumerate(zip(logprobs, tokens, strict=True)):
        _check_row(row, logprob_row, token_row)
    num_reachable = next((row for row, values in enumerate(logprobs) if not values), len(logprobs))
    return Candidates(logprobs=logprobs[:num_reachable], tokens=tokens[:num_reachable])


def _select(rows: list[list], keep: list[list[bool]]) -> list[list]:
    return [[value for value, kept in zip(row, kept_row, strict=True) if kept] for row, kept_row in zip(rows, keep, strict=True)]


def _check_row(row: int, logprobs: list[float], tokens: list[int]) -> None:
    if not logprobs:
        return
    if logprobs[0] > 0:
        raise ValueError(
            f"topk_logprobs_DK must hold log-probabilities at most 0, got {logprobs[0]} in row {row}; normalise the logits first"
        )
    if logprobs != sorted(logprobs, reverse=True):
        rank = next(rank for rank in range(1, len(logprobs)) if logprobs[rank] > logprobs[rank - 1])
        raise ValueError(
            f"topk_logprobs_DK must not increase along a row, but row {row} has {logprobs[rank]} after "
            f"{logprobs[rank - 1]}; order the candidates by logit, then by lower token id"
        )
    if len(set(tokens)) != len(tokens):
        repeated = next(token for token in tokens if tokens.count(token) > 1)
        raise ValueError(
            f"topk_tokens_DK must not repeat a token in a row, but row {row} has {repeated} twice; "
            "take the top-k over distinct token ids"
        )
    if min(tokens) < 0:
        raise ValueError(
            f"topk_tokens_DK must hold token ids of at least 0 where the log-probability is finite, got "
            f"{min(tokens)} in row {row}; give padding a log-probability of -inf"
        )
