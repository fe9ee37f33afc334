"""Runs a comparison: arms by name, interleaved blocks of the same prompts, and the folder that tells what came out.

Modules: `arms` (what a name means), `servers` (start, keep or restart), `runner` (the blocks), `output` (files and table).
What the records say is `metrics.comparison`'s.
"""
