"""Tokenizer training, and the corpus as flat files of uint16 token ids.

Documents follow each other, each closed by the end-of-text token. One document in twelve that opens with a
docstring is written as a chat (docstring asked, code answered), so that the chat tokens mean something.
This module imports no torch: its worker processes start quickly.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import zlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ddtree_bench.models.training.corpus import read_list
from ddtree_bench.models.training.settings import (
    EOS,
    EOS_ID,
    IM_END,
    IM_END_ID,
    IM_START,
    MASK,
    PAD,
    PAD_ID,
    SPECIAL_TOKENS,
    Settings,
    Workdir,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DOCSTRING = re.compile(r'\A(?:#[^\n]*\n|\s)*"""(.{40,1500}?)"""\n(.*)\Z', re.DOTALL)
CHAT_EVERY = 12
FILES_PER_JOB = 200


def train_tokenizer(workdir: Workdir, settings: Settings) -> None:
    """Learn a byte-level BPE vocabulary on part of the training files and write the tokenizer's files."""
    texts, total = [], 0
    for path in read_list(workdir, "train"):
        if total > settings.tokenizer_bytes:
            break
        texts.append(path.read_text(encoding="utf-8"))
        total += len(texts[-1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != settings.vocab_size:
        raise ValueError(
            f"the vocabulary must have {settings.vocab_size} tokens; the corpus gave {tokenizer.get_vocab_size()}; "
            "gather more text"
        )
    workdir.target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(workdir.target / "tokenizer.json"))
    write_tokenizer_settings(workdir.target, settings)
    print(f"tokenizer: {settings.vocab_size} tokens from {total / 1e6:.1f} MB", flush=True)


def write_tokenizer_settings(folder: Path, settings: Settings) -> None:
    """Write tokenizer_config.json and generation_config.json."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [MASK, IM_START, IM_END],
        "model_max_length": settings.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    generation = {"eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def as_document(text: str, name: str) -> str:
    """Return the text as it is trained on: plain, or as a chat for some files that open with a docstring."""
    if zlib.crc32(name.encode()) % CHAT_EVERY == 0 and (match := DOCSTRING.match(text)):
        asked, answered = match.group(1).strip(), match.group(2).strip()
        if answered:
            return f"{IM_START}user\n{asked}{IM_END}\n{IM_START}assistant\n{answered}{IM_END}\n"
    return text


def encode_files(job: tuple[str, list[Path]]) -> np.ndarray:
    """Return the token ids of some files, each closed by end of text (one worker's job)."""
    tokenizer_path, paths = job
    tokenizer = Tokenizer.from_file(tokenizer_path)
    ids: list[int] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if any(special in text for special in SPECIAL_TOKENS):
            continue
        ids += tokenizer.encode(as_document(text, path.name), add_special_tokens=False).ids
        ids.append(EOS_ID)
    return np.asarray(ids, dtype=np.uint16)


def tokenise(workdir: Workdir, tokenizer_folder: Path) -> None:
    """Write the training and validation splits as uint16 files, with all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer_path = str(tokenizer_folder / "tokenizer.json")
    jobs = []
    for split in ("train", "validation"):
        paths = read_list(workdir, split)
        jobs += [(split, paths[start : start + FILES_PER_JOB]) for start in range(0, len(paths), FILES_PER_JOB)]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        parts = pool.map(encode_files, [(tokenizer_path, paths) for _, paths in jobs], chunksize=1)
    for split in ("train", "validation"):
        tokens = np.concatenate([part for (name, _), part in zip(jobs, parts, strict=True) if name == split])
        tokens.tofile(workdir.tokens(split))
        print(f"tokenise: {split} {len(tokens) / 1e6:.2f} M tokens", flush=True)
