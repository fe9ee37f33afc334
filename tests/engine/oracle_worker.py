"""A rank whose engine the tests have changed: the oracle drafter of `support`, or a rank that chooses on its own.

What to change is in the JSON file that DDTREE_TEST_CHANGES names, so that every rank reads the same.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from engine_support import use_oracle

from ddtree_bench.engine import round as round_module
from ddtree_bench.engine.engine import Engine
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.engine.worker import leave_signals_to_rank_0, worker_main
from ddtree_bench.models.parallel import Parallel

CHANGES = "DDTREE_TEST_CHANGES"


def make_engine(settings: EngineSettings, parallel: Parallel) -> Engine:
    """Return an engine with the changes that the test wrote down for this rank."""
    engine = Engine(settings, parallel)
    changes = json.loads(Path(os.environ[CHANGES]).read_text())
    if "answers" in changes:
        use_oracle(engine, changes["prompts"], changes["answers"], hit_rate=changes["hit_rate"])
    if changes.get("diverging_rank") == parallel.rank:
        _choose_other_tokens(changes["diverging_round"])
    return engine


def _choose_other_tokens(first_call: int) -> None:
    """From some call on this rank's choices are off by one, as a rank-local argmax could be."""
    original, calls = round_module.choose_tokens, [0]

    def choose(*arguments: object) -> torch.Tensor:
        calls[0] += 1
        tokens_BN = original(*arguments)  # type: ignore[arg-type]
        return (tokens_BN + 1) % 8 if calls[0] >= first_call else tokens_BN

    round_module.choose_tokens = choose  # type: ignore[assignment]


if __name__ == "__main__":
    leave_signals_to_rank_0()
    worker_main(make_engine)
