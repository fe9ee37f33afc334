"""What each node of a draft tree may see, for the target's one forward over all nodes.

Letters: N nodes.
"""

import numpy as np

from ddtree_bench.tree.draft_tree import DraftTree


def compile_ddtree_visibility(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """Compute the ancestor-only mask and the positions of a tree's nodes.

    Returns:
        visibility_NN: bool, true where the column is the row's ancestor or the row itself.
        positions_N: int32, the depths; the engine adds the prefix length.
    """
    visibility_NN = np.eye(tree.num_nodes, dtype=bool)
    for node, parent in enumerate(tree.parents_N[1:].tolist(), start=1):
        visibility_NN[node, :node] = visibility_NN[parent, :node]
    return visibility_NN, tree.depths_N.copy()
