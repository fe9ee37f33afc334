"""The DDTree method for one sequence, in numpy alone (arXiv 2604.12989).

Owns what a draft tree is, how it is chosen, what its nodes may see and how it is walked. Batches, devices
and caches belong to `ddtree_bench.kernels`, which uses this package as its reference.
"""

from ddtree_bench.tree.build import build_chain, build_ddtree_tree_from_topk
from ddtree_bench.tree.draft_tree import DraftTree
from ddtree_bench.tree.layout import SiblingLinks, breadth_first_order, permute_tree, sibling_links
from ddtree_bench.tree.visibility import compile_ddtree_visibility
from ddtree_bench.tree.walk import Walk, follow_verified_tree

__all__ = [
    "DraftTree",
    "SiblingLinks",
    "Walk",
    "breadth_first_order",
    "build_chain",
    "build_ddtree_tree_from_topk",
    "compile_ddtree_visibility",
    "follow_verified_tree",
    "permute_tree",
    "sibling_links",
]
