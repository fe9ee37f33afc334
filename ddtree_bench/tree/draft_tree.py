"""The draft tree of one sequence: what it holds and what must be true of it.

Choosing the nodes is left to `build`, walking to `walk`.

Letters: N nodes.
"""

from dataclasses import dataclass

import numpy as np

_DTYPES = {"tokens_N": np.int64, "parents_N": np.int32, "depths_N": np.int32, "scores_N": np.float32}


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftTree:
    """Hold the nodes of one draft tree; node 0 is the root and every parent comes before its children.

    Args:
        tokens_N: int64; tokens_N[0] is the root's token, which no rule compares.
        parents_N: int32, index of the parent; −1 for the root.
        depths_N: int32, 0 for the root, one more than the parent's for every other node.
        scores_N: float32, summed log-probability of the prefix that ends in the node; 0 for the root.

    Raises:
        TypeError: an array has another type or dtype.
        ValueError: lengths differ, the order is broken, or two siblings carry the same token.
    """

    tokens_N: np.ndarray
    parents_N: np.ndarray
    depths_N: np.ndarray
    scores_N: np.ndarray

    @property
    def num_nodes(self) -> int:
        """Count the nodes, root included."""
        return len(self.parents_N)

    @property
    def num_draft_tokens(self) -> int:
        """Count the nodes without the root."""
        return self.num_nodes - 1

    def __post_init__(self) -> None:
        self._check_arrays()
        parents, depths = self.parents_N, self.depths_N
        if parents[0] != -1 or depths[0] != 0 or self.scores_N[0] != 0:
            raise ValueError(
                f"node 0 must be the root with parent -1, depth 0 and score 0, but has parent {parents[0]}, "
                f"depth {depths[0]}, score {self.scores_N[0]}; put the root first"
            )
        parents_of_drafts = parents[1:]
        is_misplaced = (parents_of_drafts < 0) | (parents_of_drafts >= np.arange(1, len(parents)))
        if is_misplaced.any():
            node = int(is_misplaced.argmax()) + 1
            raise ValueError(
                f"parents must come before their children, but node {node} has parent {parents[node]}; "
                "order the nodes so that 0 <= parents_N[i] < i"
            )
        is_wrong_depth = depths[1:] != depths[parents_of_drafts] + 1
        if is_wrong_depth.any():
            node = int(is_wrong_depth.argmax()) + 1
            raise ValueError(
                f"depths_N must be the parent's depth plus 1, but node {node} has {depths[node]} under a parent of "
                f"depth {depths[parents[node]]}; recompute depths_N from parents_N"
            )
        self._check_siblings()

    def _check_arrays(self) -> None:
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                given = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{name} must be a numpy array of {dtype.__name__}, got {given}; convert it first")
            if array.ndim != 1 or len(array) != len(self.parents_N) or len(array) == 0:
                raise ValueError(
                    f"{name} must have one entry a node and at least the root, got shape {array.shape} beside "
                    f"{len(self.parents_N)} parents; give the four arrays the same length"
                )

    def _check_siblings(self) -> None:
        order = np.lexsort((self.tokens_N, self.parents_N))
        parents, tokens = self.parents_N[order], self.tokens_N[order]
        is_repeated = (parents[1:] == parents[:-1]) & (tokens[1:] == tokens[:-1])
        if is_repeated.any():
            first = int(is_repeated.argmax())
            raise ValueError(
                f"siblings must carry different tokens, but two children of node {parents[first]} carry "
                f"{tokens[first]}; a walk could not tell them apart, so drop one"
            )
