"""From the flags of `serve` to settings that can work: folders resolved, the drafter's block read, combinations checked.

Imports torch; the command line sets the thread variables before it imports this.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.models.parallel import Parallel
from ddtree_bench.models.tokenizer import Tokenizer
from ddtree_bench.models.weights import bundled_drafter_of, read_config, resolve_model
from ddtree_bench.server.protocol import ServedModel

log = logging.getLogger(__name__)

UNUSED_KNOBS = {
    "plain": ("drafter", "block_size", "depth", "top_k", "branching", "node_budget", "draft_temperature"),
    "linear": ("top_k", "branching", "node_budget", "draft_temperature"),
    "tree": (),
}


def prepare(
    *,
    model: str,
    drafter: str | None,
    mode: str,
    block_size: int | None,
    knobs: Mapping[str, Any],
    engine: Mapping[str, Any],
    given: frozenset[str] = frozenset(),
    served_model_name: str | None = None,
) -> tuple[EngineSettings, ServedModel]:
    """Return the engine's settings and the model as clients see it.

    Args:
        model, drafter: bundled name or folder.
        block_size: None is the drafter's.
        knobs: the other fields of TreeSetting.
        engine: the other fields of EngineSettings.
        given: names of flags that were written out, told where they do not count in this mode.

    Raises:
        ValueError: a folder is missing, or values do not go together.
    """
    unused = sorted(given & set(UNUSED_KNOBS[mode]))
    if unused:
        log.warning("mode %s does not use %s: left out", mode, ", ".join(f"--{name.replace('_', '-')}" for name in unused))
    if served_model_name == "":
        raise ValueError("--served-model-name must not be empty; leave it out for the name of --model")
    folder = resolve_model(model)
    if mode == "plain":
        drafter, tree = None, TreeSetting(mode="plain")
    else:
        drafter_folder = find_drafter(model, drafter, mode)
        drafter = drafter or drafter_folder.name
        block_size = drafter_block(drafter_folder, block_size)
        tree = TreeSetting(mode=mode, block_size=block_size, **knobs)
    settings = EngineSettings(model=model, drafter=drafter, tree=tree, **engine)
    check_ranks(folder, settings.tensor_parallel)
    check_device(settings)
    return settings, served_model(folder, settings, served_model_name)


def find_drafter(model: str, drafter: str | None, mode: str) -> Path:
    """Return the drafter's folder: the one named, else the one that ships for the model."""
    if drafter is not None:
        return resolve_model(drafter)
    bundled = bundled_drafter_of(model)
    if bundled is None:
        raise ValueError(
            f"--drafter must be given for a model that ships none; given --model {model} --mode {mode} alone; "
            "pass the DFlash drafter's folder or --mode plain"
        )
    return bundled


def drafter_block(folder: Path, block_size: int | None) -> int:
    """Return the block size to use: the drafter's own, or a smaller one that was asked for."""
    own = read_config(folder).get("block_size")
    if not isinstance(own, int) or own < 2:
        raise ValueError(f"a drafter's config.json must hold block_size of at least 2; {folder} holds {own!r}; use another")
    if block_size is not None and block_size > own:
        raise ValueError(
            f"--block-size must be at most {own}, what the drafter {folder.name} was trained for; given {block_size}; lower it"
        )
    return own if block_size is None else block_size


def check_ranks(folder: Path, num_ranks: int) -> None:
    """Raise where the target's heads do not divide over the ranks, before any of them is started."""
    config = read_config(folder)
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if num_ranks == 1 or not isinstance(heads, int) or not isinstance(kv_heads, int) or kv_heads < 1:
        return  # what a config must hold is for the loader to say
    first = Parallel(rank=0, world_size=num_ranks)
    first.shard_range(heads, "num_attention_heads")
    first.kv_head_range(kv_heads)


def check_device(settings: EngineSettings) -> None:
    """Raise where the GPUs that are asked for are not there."""
    if settings.device != "cuda":
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < settings.tensor_parallel:
        raise ValueError(
            f"--device cuda needs a GPU for each of {settings.tensor_parallel} ranks; torch sees {found}; "
            "use --device cpu, a lower --tensor-parallel, or a torch with CUDA (ddtree-bench doctor tells)"
        )


def served_model(folder: Path, settings: EngineSettings, name: str | None) -> ServedModel:
    """Return the model as clients see it; the context is the checkpoint's until the engine tells what fits its cache."""
    config = read_config(folder)
    context: int = config.get("max_position_embeddings", 32_768)
    vocab_size: int = config.get("vocab_size", 0)
    for key, value in (("max_position_embeddings", context), ("vocab_size", vocab_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} in {folder / 'config.json'} must be an integer of at least 1; given {value!r}")
    has_tokenizer = (folder / "tokenizer.json").exists()
    return ServedModel(
        model_id=name or settings.model,
        model_path=str(folder.resolve()),
        tokenizer=Tokenizer.load(folder) if has_tokenizer else None,
        max_context=min(context, settings.max_context or context),
        vocab_size=vocab_size,
        aliases=(settings.model, folder.name),
    )
