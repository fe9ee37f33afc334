"""Choose the nodes of a draft tree from the drafter's per-depth candidates (arXiv 2604.12989).

Owns the order of prefixes and its ties. Softmax, draft temperature and top-k are done before;
lowering caps that cannot bind is left to the configuration.

Letters: D draft depths, K candidates of a depth, N nodes.
"""

from heapq import heappop, heappush

import numpy as np

from ddtree_bench.tree.candidates import Candidates, read_candidates
from ddtree_bench.tree.draft_tree import DraftTree


def build_ddtree_tree_from_topk(
    topk_logprobs_DK: np.ndarray,
    topk_tokens_DK: np.ndarray,
    *,
    node_budget: int,
    depth: int | None = None,
    branching: int | None = None,
    root_token: int = 0,
) -> DraftTree:
    """Build the tree of the `node_budget` best prefixes.

        score(r_1 … r_d) = Σ_i log q_i(r_i), added in float64 in depth order from the float32 table

    Higher scores come first; equal scores are ordered by the lexicographically smaller tuple of ranks, a prefix
    before its extensions. No prefix scores above its parent, so the set is closed under parents and the order of
    the nodes is the order in which best-first search meets them.

    Args:
        topk_logprobs_DK: log-probabilities at most 0, not increasing along a row, read as float32. NaN and −inf are
            never selected; the candidates after them still may be.
        topk_tokens_DK: integer token ids of the candidates, different within a row where selectable.
        node_budget: most draft nodes; the root is not counted.
        depth: most edges between the root and a node; None for D.
        branching: most children of a node below the root (the root may have K); None for K.
        root_token: token of node 0; never compared.

    Returns:
        The tree; it has fewer than `node_budget` draft nodes only where the caps allow no more.

    Raises:
        TypeError: an argument is not of its stated type.
        ValueError: a count is out of range, or a row breaks the rules above.
    """
    _check_count("node_budget", node_budget, at_least=0)
    if branching is not None:
        _check_count("branching", branching, at_least=1)
    candidates = read_candidates(topk_logprobs_DK, topk_tokens_DK, _num_depths(depth))
    rows = candidates.logprobs
    widths = [
        len(row) if row_depth == 1 or branching is None else min(branching, len(row))
        for row_depth, row in enumerate(rows, start=1)
    ]

    scores, parents = [0.0], [-1]
    ranks_of_nodes: list[tuple[int, ...]] = [()]
    # An entry is (−score, ranks from the root, parent). Ranks differ between prefixes, so parents are never compared.
    heap: list[tuple[float, tuple[int, ...], int]] = [(-rows[0][0], (0,), 0)] if rows else []
    while heap and len(parents) <= node_budget:
        negative_score, ranks, parent = heappop(heap)
        node, node_depth, next_rank = len(parents), len(ranks), ranks[-1] + 1
        scores.append(-negative_score)
        parents.append(parent)
        ranks_of_nodes.append(ranks)
        if next_rank < widths[node_depth - 1]:
            sibling_score = scores[parent] + rows[node_depth - 1][next_rank]
            heappush(heap, (-sibling_score, (*ranks[:-1], next_rank), parent))
        if node_depth < len(rows):
            heappush(heap, (negative_score - rows[node_depth][0], (*ranks, 0), node))
    return _assemble(candidates, root_token, scores, parents, ranks_of_nodes)


def build_chain(
    topk_logprobs_DK: np.ndarray, topk_tokens_DK: np.ndarray, *, depth: int | None = None, root_token: int = 0
) -> DraftTree:
    """Build the chain of the best candidate of each depth: linear drafting as a tree.

    Args: as for `build_ddtree_tree_from_topk`.

    Returns:
        A tree in which node d is the only child of node d − 1. It ends before a depth that has nothing to select.

    Raises: as `build_ddtree_tree_from_topk`.
    """
    candidates = read_candidates(topk_logprobs_DK, topk_tokens_DK, _num_depths(depth))
    scores, parents = [0.0], [-1]
    ranks_of_nodes: list[tuple[int, ...]] = [()]
    for row in candidates.logprobs:
        scores.append(scores[-1] + row[0])
        parents.append(len(parents) - 1)
        ranks_of_nodes.append((*ranks_of_nodes[-1], 0))
    return _assemble(candidates, root_token, scores, parents, ranks_of_nodes)


def _num_depths(depth: int | None) -> int | None:
    if depth is not None:
        _check_count("depth", depth, at_least=0)
    return depth


def _check_count(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}); pass an int")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}; raise it")


def _assemble(
    candidates: Candidates,
    root_token: int,
    scores: list[float],
    parents: list[int],
    ranks_of_nodes: list[tuple[int, ...]],
) -> DraftTree:
    tokens = [int(root_token)]
    tokens += [candidates.tokens[len(ranks) - 1][ranks[-1]] for ranks in ranks_of_nodes[1:]]
    return DraftTree(
        tokens_N=np.array(tokens, dtype=np.int64),
        parents_N=np.array(parents, dtype=np.int32),
        depths_N=np.array([len(ranks) for ranks in ranks_of_nodes], dtype=np.int32),
        scores_N=np.array(scores, dtype=np.float32),
    )
