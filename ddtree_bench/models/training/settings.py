"""Sizes of a training run: `full` makes the pair that ships, `smoke` runs every stage in a minute on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

EOS, MASK, IM_START, IM_END, PAD = "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (EOS, MASK, IM_START, IM_END, PAD)
"""Their ids are their places in this tuple."""

EOS_ID, MASK_ID, IM_START_ID, IM_END_ID, PAD_ID = range(5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of corpus, models and batches.

    Args:
        max_corpus_bytes, tokenizer_bytes: most source text to gather; part of it the tokenizer learns from.
        batch_tokens: tokens of one target step, at either sequence length.
        sequence_length, long_sequence_length: windows of the first part and of the end of target training.
        long_share: share of the time spent at the long length.
        drafter_length: tokens of a drafter training sequence.
        num_anchors: roots drawn from each sequence.
        real_share: share of the drafter's time on real code before the target's own outputs.
        generate_rows: sequences decoded together.
    """

    max_corpus_bytes: int = 1_000_000_000
    tokenizer_bytes: int = 60_000_000
    vocab_size: int = 8_192
    hidden_size: int = 256
    num_layers: int = 10
    num_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 640
    max_positions: int = 2_048
    batch_tokens: int = 131_072
    sequence_length: int = 1_024
    long_sequence_length: int = 2_048
    long_share: float = 0.12
    target_learning_rate: float = 3e-3
    generate_rows: int = 4_096
    num_draft_layers: int = 2
    target_layer_ids: tuple[int, ...] = (1, 5, 8)
    block_size: int = 16
    drafter_length: int = 384
    drafter_rows: int = 128
    num_anchors: int = 48
    real_share: float = 0.2
    drafter_learning_rate: float = 3e-3


FULL = Settings()
SMOKE = Settings(
    max_corpus_bytes=4_000_000,
    tokenizer_bytes=400_000,
    vocab_size=512,
    hidden_size=64,
    num_layers=3,
    num_heads=2,
    head_dim=32,
    intermediate_size=128,
    max_positions=512,
    batch_tokens=1_024,
    sequence_length=128,
    long_sequence_length=256,
    generate_rows=32,
    target_layer_ids=(0, 1, 2),
    drafter_length=96,
    drafter_rows=4,
    num_anchors=4,
)
SCALES = {"full": FULL, "smoke": SMOKE}


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Where each stage leaves its results for the next."""

    root: Path

    @property
    def corpus_list(self) -> Path:
        return self.root / "corpus" / "files.jsonl"

    @property
    def manifest(self) -> Path:
        return self.root / "corpus" / "manifest.json"

    def tokens(self, split: str) -> Path:
        return self.root / "corpus" / f"{split}.bin"

    @property
    def generated(self) -> Path:
        return self.root / "generated"

    @property
    def target(self) -> Path:
        return self.root / "export" / "tiny-dense"

    @property
    def drafter(self) -> Path:
        return self.root / "export" / "tiny-dense-dflash"

    def state(self, stage: str) -> Path:
        return self.root / f"{stage}.state.pt"

    def log(self, stage: str) -> Path:
        return self.root / f"{stage}.log.jsonl"
