"""The target's own text, which the drafter learns most from: prompts cut from training files, continued.

Two rows in five are greedy, the others sampled at temperatures between 0.6 and 1. After an end-of-text token a row
goes on with the next document it invents. Each batch is one file: tokens_BL, temperature_B, prompt_length.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from ddtree_bench.models.qwen3 import Qwen3Model
from ddtree_bench.models.tokenizer import Tokenizer
from ddtree_bench.models.training.common import Log, Machine, Windows
from ddtree_bench.models.training.sampling import continue_rows
from ddtree_bench.models.training.settings import EOS_ID, Settings, Workdir
from ddtree_bench.models.weights import load_target

PROMPT_LENGTHS = (32, 64, 96, 128, 192)
GREEDY_SHARE = 0.4
LOW_TEMPERATURE, HIGH_TEMPERATURE = 0.6, 1.0
SAMPLE_PROMPTS = (
    "import os\nimport sys\n\n\ndef read_lines(path):",
    'class Queue:\n    """A first-in, first-out queue."""\n\n    def __init__(self):',
    "def test_parse_date():",
    'def moving_average(values, window):\n    """Return the moving average of values."""',
)


def load_for(machine: Machine, workdir: Workdir) -> Qwen3Model:
    """Load the exported target as it will be served: bfloat16 on a GPU, float32 on a CPU."""
    return load_target(workdir.target, dtype=machine.activation_dtype, device=machine.device)


def generate(workdir: Workdir, settings: Settings, machine: Machine, seconds: float, max_tokens: float) -> None:
    """Write batches until the seconds are used or enough new tokens exist; earlier batches count."""
    model = load_for(machine, workdir)
    windows = Windows(workdir.tokens("train"), machine.device)
    workdir.generated.mkdir(parents=True, exist_ok=True)
    log = Log("generate", workdir.log("generate"))
    length, rows = settings.drafter_length, settings.generate_rows
    start_s, number, num_new = time.monotonic(), 0, 0
    while time.monotonic() - start_s < seconds and num_new < max_tokens:
        prompt_length = min(PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)], length // 2)
        num_new += rows * (length - prompt_length)
        path = workdir.generated / f"batch-{number:05d}.npz"
        if not path.exists():
            generator = torch.Generator(machine.device).manual_seed(11_000_003 + number)
            prompts_BP = windows.sample(rows, prompt_length, generator)
            temperature_B = torch.empty(rows, device=machine.device)
            temperature_B.uniform_(LOW_TEMPERATURE, HIGH_TEMPERATURE, generator=generator)
            temperature_B[: int(GREEDY_SHARE * rows)] = 0.0
            lengths_B = torch.full((rows,), prompt_length, device=machine.device)
            tokens_BL = continue_rows(model, prompts_BP, lengths_B, length, temperature_B, seed=number)
            part = path.with_suffix(".part.npz")
            np.savez(
                part,
                tokens=tokens_BL.cpu().numpy().astype(np.uint16),
                temperature=temperature_B.cpu().numpy(),
                prompt_length=prompt_length,
            )
            part.replace(path)
        number += 1
        if number % 5 == 1:
            log.write(batches=number, new_tokens_m=num_new / 1e6, tok_s=num_new / (time.monotonic() - start_s))
    log.write(batches=number, new_tokens_m=num_new / 1e6)


def show_samples(workdir: Workdir, machine: Machine, new_tokens: int = 96) -> None:
    """Print completions, greedy and at temperature 0.6, to see whether they are code."""
    model, tokenizer = load_for(machine, workdir), Tokenizer.load(workdir.target)
    prompts = [tokenizer.encode(text) for text in SAMPLE_PROMPTS] * 2
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=machine.device)
    longest = max(map(len, prompts))
    prompts_BP = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=machine.device)
    temperature_B = torch.tensor([0.0, 0.6], device=machine.device).repeat_interleave(len(SAMPLE_PROMPTS))
    tokens_BL = continue_rows(model, prompts_BP, lengths_B, longest + new_tokens, temperature_B, seed=3)
    for row, temperature in zip(tokens_BL.tolist(), temperature_B.tolist(), strict=True):
        end = row.index(EOS_ID, 1) if EOS_ID in row[1:] else len(row)
        print(f"---- temperature {temperature:.1f}\n{tokenizer.decode(row[:end])}", flush=True)
