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
    if changes.get("noisy_rank") == parallel.rank:
        _shift_logits(engine, changes["noise"])
    return engine


def _shift_logits(engine: Engine, noise: float | None) -> None:
    """This rank's logits of both models are one float32 step higher or lower by turns, or off by noise of its own."""
    generator = torch.Generator().manual_seed(1)
    originals = {name: getattr(engine.runner, name) for name in ("logits", "draft_logits")}

    def shifted(x: torch.Tensor) -> torch.Tensor:
        if noise is not None:
            return x + noise * torch.randn(x.shape, generator=generator)
        is_even = torch.arange(x.shape[-1]) % 2 == 0
        up, down = (torch.nextafter(x, torch.full_like(x, end)) for end in (torch.inf, -torch.inf))
        return torch.where(x.isfinite(), torch.where(is_even, up, down), x)

    for name, original in originals.items():
        setattr(engine.runner, name, lambda *arguments, original=original: shifted(original(*arguments)))


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
