"""Follow the target's choices down a verified draft tree.

How the target chooses (argmax, or a sample of its own distribution) is left to the engine.

Letters: N nodes.
"""

from dataclasses import dataclass

import numpy as np

from ddtree_bench.tree.draft_tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Hold the accepted path of one verify step and the target's own token after it.

    Args:
        node_indices: nodes from the root (0) to the last accepted node.
        num_accepted: draft tokens accepted; the root and the bonus are not counted.
        bonus_token: the target's choice at the last accepted node, the next root.

    Raises:
        ValueError: num_accepted is not len(node_indices) − 1, or the path does not begin at the root.
    """

    node_indices: tuple[int, ...]
    num_accepted: int
    bonus_token: int

    def __post_init__(self) -> None:
        if self.node_indices[:1] != (0,) or self.num_accepted != len(self.node_indices) - 1:
            raise ValueError(
                f"node_indices must begin with 0 and hold num_accepted + 1 nodes, got {self.node_indices} with "
                f"num_accepted={self.num_accepted}; count the nodes after the root"
            )


def follow_verified_tree(tree: DraftTree, target_tokens_N: np.ndarray) -> Walk:
    """Walk from the root to the child whose token is the target's choice, until no child matches.

    Args:
        tree: the verified tree.
        target_tokens_N: integers, the target's choice of the token after each node.

    Raises:
        TypeError: target_tokens_N does not hold integers.
        ValueError: target_tokens_N has not one token a node.
    """
    targets_N = np.asarray(target_tokens_N)
    if targets_N.dtype.kind not in "iu":
        raise TypeError(f"target_tokens_N must hold integers, got {targets_N.dtype}; pass token ids")
    if targets_N.shape != (tree.num_nodes,):
        raise ValueError(
            f"target_tokens_N must hold one token a node ({tree.num_nodes}), got shape {targets_N.shape}; "
            "pass the target's choice at every node, the root included"
        )
    path = [0]
    is_matched_N = tree.tokens_N == targets_N[tree.parents_N]
    is_matched_N[0] = False
    while True:
        matches = np.flatnonzero(is_matched_N & (tree.parents_N == path[-1]))
        if not len(matches):
            return Walk(node_indices=tuple(path), num_accepted=len(path) - 1, bonus_token=int(targets_N[path[-1]]))
        path.append(int(matches[0]))
