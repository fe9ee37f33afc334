"""Other layouts of a draft tree: permutations and links kept beside it, never a second tree format.

Letters: N nodes.
"""

from dataclasses import dataclass

import numpy as np

from ddtree_bench.tree.draft_tree import DraftTree


@dataclass(frozen=True, kw_only=True, eq=False)
class SiblingLinks:
    """Hold a tree as links: siblings in node order, −1 where there is none.

    Args:
        first_child_N: int32, the child with the lowest index.
        next_sibling_N: int32, the next child of the same parent.
    """

    first_child_N: np.ndarray
    next_sibling_N: np.ndarray


def sibling_links(tree: DraftTree) -> SiblingLinks:
    """Compute the first-child / next-sibling links of a tree."""
    first_child, next_sibling = [-1] * tree.num_nodes, [-1] * tree.num_nodes
    # Nodes are met from last to first, so what a parent points to is always the next sibling.
    for node, parent in zip(range(tree.num_nodes - 1, 0, -1), tree.parents_N[:0:-1].tolist(), strict=True):
        next_sibling[node] = first_child[parent]
        first_child[parent] = node
    return SiblingLinks(
        first_child_N=np.array(first_child, dtype=np.int32), next_sibling_N=np.array(next_sibling, dtype=np.int32)
    )


def breadth_first_order(tree: DraftTree) -> np.ndarray:
    """List the nodes level by level, siblings side by side.

    Returns:
        order_N: int64; order_N[i] is the node that stands i-th.
    """
    links = sibling_links(tree)
    first_child, next_sibling = links.first_child_N.tolist(), links.next_sibling_N.tolist()
    order = [0]
    for node in order:
        child = first_child[node]
        while child != -1:
            order.append(child)
            child = next_sibling[child]
    return np.array(order, dtype=np.int64)


def permute_tree(tree: DraftTree, order_N: np.ndarray) -> DraftTree:
    """Rewrite a tree so that its node order_N[i] becomes node i.

    Args:
        order_N: integers, each node once, the root first and parents before children.

    Raises:
        ValueError: order_N is no such order.
    """
    if not np.array_equal(np.sort(order_N), np.arange(tree.num_nodes)):
        raise ValueError(f"order_N must hold each of the {tree.num_nodes} nodes once, got {order_N}; pass a permutation")
    place_N = np.empty(tree.num_nodes, dtype=np.int32)
    place_N[order_N] = np.arange(tree.num_nodes, dtype=np.int32)
    old_parents_N = tree.parents_N[order_N]
    return DraftTree(
        tokens_N=tree.tokens_N[order_N],
        parents_N=np.where(old_parents_N < 0, np.int32(-1), place_N[old_parents_N]),
        depths_N=tree.depths_N[order_N],
        scores_N=tree.scores_N[order_N],
    )
