"""The same losslessness on a GPU, and the same choices there as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_support import PLAIN, engine_of, outputs, prompt_of, request_of, use_oracle

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.noise import gumbel_noise

pytestmark = pytest.mark.gpu

PROMPTS = {f"r{i}": prompt_of(i, 4 + 5 * i) for i in range(4)}
SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.7, "top_k": 20, "logprobs": 2},
    {"temperature": 1.1, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
]
REQUESTS = [
    request_of(name, prompt, max_tokens=30, **sampling)
    for (name, prompt), sampling in zip(PROMPTS.items(), SAMPLINGS, strict=True)
]


def test_noise_bits_are_those_of_the_cpu() -> None:
    positions = torch.tensor([[0, 7, 2047], [5, 5, 6]])
    on_gpu = gumbel_noise([3, 2**63], positions.cuda(), 100, 5000).cpu()
    torch.testing.assert_close(on_gpu, gumbel_noise([3, 2**63], positions, 100, 5000), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "setting",
    [
        TreeSetting(mode="linear", block_size=8),
        TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4),
        TreeSetting(mode="tree", block_size=16, node_budget=63, top_k=8),
    ],
    ids=TreeSetting.label,
)
def test_every_mode_gives_the_tokens_of_plain_decoding(pair: Path, setting: TreeSetting) -> None:
    plain = outputs(engine_of(pair, PLAIN, device="cuda"), REQUESTS)
    engine = engine_of(pair, setting, device="cuda")
    use_oracle(engine, PROMPTS, plain, hit_rate=0.7)
    assert outputs(engine, REQUESTS) == plain
    assert engine.stats().num_accepted > 0
    assert engine.stats().num_free_pages == engine.stats().num_total_pages
