"""What the engine's tests share: tiny random checkpoints, and a drafter that knows the answer most of the time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.engine import Engine
from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate, SamplingParams
from ddtree_bench.engine.runner import Runner
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.models.dflash import DFlashConfig
from ddtree_bench.models.qwen3 import Qwen3Config

VOCAB_SIZE = 96
PLAIN = TreeSetting(mode="plain")
CHAINS = [TreeSetting(mode="linear", block_size=block_size) for block_size in (4, 8, 16)]
TREES = [
    TreeSetting(mode="tree", block_size=block_size, node_budget=budget, top_k=4)
    for block_size in (4, 8, 16)
    for budget in (1, 7, 15, 63)
]
SHAPED = [
    TreeSetting(mode="tree", block_size=8, depth=3, node_budget=15, top_k=8, branching=2, draft_temperature=0.6),
    TreeSetting(mode="tree", block_size=8, node_budget=7, top_k=1),
    TreeSetting(mode="tree", block_size=8, node_budget=15, depth=1),
    TreeSetting(mode="tree", block_size=8, node_budget=0),
]


def write_pair(folder: Path, *, max_context: int = 256, eos_token_id: int | None = None, **sizes: Any) -> Path:
    """Write config.json of a target and its drafter; weights are made by load_format "dummy"."""
    target = Qwen3Config(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 8,
            "intermediate_size": 64,
            "max_position_embeddings": max_context,
            **sizes,
        }
    )
    drafter = DFlashConfig(
        layers=dataclasses.replace(target, num_hidden_layers=1),
        block_size=16,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(0, target.num_hidden_layers - 1),
        num_target_layers=target.num_hidden_layers,
    )
    configs = {"target": {**target.to_dict(), "eos_token_id": eos_token_id}, "drafter": drafter.to_dict()}
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def settings_of(pair: Path, tree: TreeSetting = PLAIN, **changes: Any) -> EngineSettings:
    """Return small settings for a pair of checkpoints."""
    values = {"max_total_tokens": 4096, "page_size": 4, "max_running_requests": 8, "load_format": "dummy", **changes}
    return EngineSettings(model=str(pair / "target"), drafter=str(pair / "drafter"), tree=tree, **values)


def request_of(name: str, prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_tokens=tuple(prompt), sampling=SamplingParams(**sampling))


def prompt_of(seed: int, length: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def tokens_of(updates: Sequence[GenerationUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def outputs(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    """Run requests together and return each one's output tokens."""
    return {name: tokens_of(updates) for name, updates in engine.generate(requests).items()}


def use_oracle(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    answers: Mapping[str, Sequence[int]],
    *,
    hit_rate: float | Mapping[str, float],
    keeps_drafter: bool = False,
) -> None:
    """Replace the drafter's logits: noise, and the true next token on top with probability `hit_rate` a depth.

    What is drawn depends on the token's position alone, so every rank and every run draws the same. With some more
    probability the true token is only among the next candidates, where a tree can still find it. With `keeps_drafter`
    the drafter runs too and its own logits, which spread like the noise, take the noise's place.
    """
    runner = engine.runner
    rates = hit_rate if isinstance(hit_rate, Mapping) else dict.fromkeys(prompts, hit_rate)
    truth = {name: [*prompts[name], *answers[name]] for name in prompts}

    def draft_logits(root_tokens_B: Any, prefix_lengths_B: Any, page_table_BP: Any) -> torch.Tensor:
        names = [sequence.request.request_id for sequence in engine.scheduler.running if sequence.is_prefilled]
        prefixes = prefix_lengths_B.tolist()
        assert len(names) == len(prefixes), "every prefilled sequence is in the round"
        rows = [
            _oracle_row(truth[name], prefix + depth, runner.vocab_size, rates[name], has_noise=not keeps_drafter)
            for name, prefix in zip(names, prefixes, strict=True)
            for depth in range(1, runner.setting.max_depth + 1)
        ]
        logits_RW = torch.nn.functional.pad(torch.stack(rows), (0, 8), value=-torch.inf)
        start = runner.vocab_offset
        shard_RV = logits_RW[:, start : start + runner.num_local_tokens]
        missing = runner.num_local_tokens - shard_RV.shape[1]
        drawn_RV = torch.nn.functional.pad(shard_RV, (0, missing), value=-torch.inf).to(runner.device)
        if not keeps_drafter:
            return drawn_RV
        own_RV = Runner.draft_logits(runner, root_tokens_B, prefix_lengths_B, page_table_BP)
        return torch.where(drawn_RV.isnan(), own_RV, drawn_RV)

    runner.draft_logits = draft_logits  # type: ignore[method-assign]


def _oracle_row(truth: Sequence[int], position: int, vocab_size: int, hit_rate: float, *, has_noise: bool) -> torch.Tensor:
    """Return one depth's logits; without noise only the true token has one, the others are NaN."""
    generator = torch.Generator().manual_seed(7919 * position + len(truth))
    logits_V = torch.randn(vocab_size, generator=generator)
    draw = float(torch.rand(1, generator=generator))
    if not has_noise:
        logits_V.fill_(torch.nan)
    if position < len(truth):
        logits_V[truth[position]] = 6.0 if draw < hit_rate else 2.4
    return logits_V


def engine_of(pair: Path, tree: TreeSetting = PLAIN, **changes: Any) -> Engine:
    return Engine(settings_of(pair, tree, **changes))
