"""Training of the bundled pair, from sources on this machine to files that ship.

Stages, in order, each resumable and each run as `python -m ddtree_bench.models.training STAGE --workdir DIR`:
corpus, tokenizer, target, generate, drafter, export, evaluate; `all` runs them one after another.
`prompts` cuts the held-out prompts that ship, from packages that the corpus leaves out.
"""
