"""`python -m ddtree_bench` is the command line."""

from ddtree_bench.cli import main

main()
