"""What runs, as clients ask for it: /server_info and /model_info under SGLang's names, and a `ddtree` block under ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddtree_bench import __version__
from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.server.metrics import Counters
from ddtree_bench.server.protocol import ServedModel

ALGORITHMS = {"plain": None, "linear": "DFLASH", "tree": "DDTREE"}


def effective_tree(setting: TreeSetting) -> dict[str, Any]:
    """Return the canonical tree setting and its verify width; in mode plain the knobs are None, they do not count there."""
    canonical = setting.canonical()
    row: dict[str, Any] = dataclasses.asdict(canonical)
    if canonical.mode == "plain":
        row |= dict.fromkeys((name for name in row if name != "mode"), None)
    elif canonical.mode == "linear":
        row |= {"branching": None, "draft_temperature": None}
    return row | {"verify_width": canonical.verify_width, "max_depth": canonical.max_depth if row["depth"] else 0}


def full_context_requests(settings: EngineSettings, model: ServedModel, stats: Any) -> int | None:
    """Return how many requests of full context the cache holds at once; below max_running_requests, memory caps first."""
    if stats is None:
        return None
    slots = model.max_context + settings.tree.canonical().verify_width
    return int(stats.num_total_pages // -(-slots // settings.page_size))


def server_info(settings: EngineSettings, model: ServedModel, counters: Counters, stats: Any, status: str) -> dict[str, Any]:
    """Return the body of /server_info.

    Args:
        settings: what the engine was started with, resolved (no value that the engine picks is None where it told).
        stats: the engine's newest stats, None while it loads.
        status: "ready" or why not.
    """
    tree = settings.tree.canonical()
    speculates = tree.mode != "plain"
    state: dict[str, Any] = {"effective_max_running_requests_per_dp": settings.max_running_requests}
    if speculates and counters.acceptance_length is not None:
        state["avg_spec_accept_length"] = counters.acceptance_length
    return {
        "status": status,
        "version": __version__,
        "model_path": model.model_path,
        "tokenizer_path": model.model_path,
        "served_model_name": model.model_id,
        "tp_size": settings.tensor_parallel,
        "dp_size": 1,
        "pp_size": 1,
        "device": settings.device,
        "dtype": settings.dtype,
        "page_size": settings.page_size,
        "load_format": settings.load_format,
        "context_length": model.max_context,
        "max_running_requests": settings.max_running_requests,
        "max_total_num_tokens": stats.num_total_pages * settings.page_size if stats is not None else settings.max_total_tokens,
        "chunked_prefill_size": settings.max_prefill_tokens,
        "disable_radix_cache": True,
        "random_seed": settings.seed,
        "speculative_algorithm": ALGORITHMS[tree.mode],
        "speculative_draft_model_path": settings.drafter if speculates else None,
        "speculative_num_steps": tree.max_depth if speculates else None,
        "speculative_eagle_topk": tree.top_k if speculates else None,
        "speculative_num_draft_tokens": tree.verify_width if speculates else None,
        "speculative_dflash_block_size": tree.block_size if speculates else None,
        "internal_states": [state],
        "ddtree": {
            "engine": "embedded",
            "model": model.model_id,
            "drafter": settings.drafter if speculates else None,
            **effective_tree(settings.tree),
            "asked": dataclasses.asdict(settings.tree),
            "device": settings.device,
            "dtype": settings.dtype,
            "tensor_parallel": settings.tensor_parallel,
            "load_format": settings.load_format,
            "page_size": settings.page_size,
            "threads": settings.threads_per_rank,
            "max_running_requests": settings.max_running_requests,
            "full_context_requests": full_context_requests(settings, model, stats),
            "max_prefill_tokens": settings.max_prefill_tokens,
            "max_context": model.max_context,
            "is_digest_checked": settings.tensor_parallel > 1,
            "noise_keyed_by_position": True,  # (seed, absolute position): plain, linear and tree sample the same tokens
            "stats": dataclasses.asdict(stats) if dataclasses.is_dataclass(stats) and not isinstance(stats, type) else None,
        },
    }


def model_info(model: ServedModel) -> dict[str, Any]:
    """Return the body of /model_info and /get_model_info."""
    return {"model_path": model.model_path, "tokenizer_path": model.model_path, "is_generation": True}


def model_list(model: ServedModel, created: int) -> dict[str, Any]:
    """Return the body of /v1/models."""
    row = {
        "id": model.model_id,
        "object": "model",
        "created": created,
        "owned_by": "ddtree-bench",
        "root": model.model_path,
        "parent": None,
        "max_model_len": model.max_context,
    }
    return {"object": "list", "data": [row]}
