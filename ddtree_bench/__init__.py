"""ddtree-bench: find, prove and serve the fastest DDTree setting on the hardware at hand (arXiv 2604.12989)."""

__version__ = "0.1.0"
