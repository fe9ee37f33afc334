"""How many pages the caches get: what was asked for, or what free memory allows."""

from __future__ import annotations

import psutil
import torch

from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.models.parallel import Parallel

# Shares of free memory. On a GPU the rest is for activations and logits; a CPU's memory belongs to other programs too.
CUDA_SHARE = 0.8
CPU_SHARE = 0.25


def plan_pages(
    settings: EngineSettings, parallel: Parallel, *, device: torch.device, bytes_per_token: int, model_context: int
) -> int:
    """Return the number of pages, the same on every rank.

    Sized from memory, the pool never exceeds what `max_running_requests` requests of full context can use.

    Raises:
        ValueError: fewer than one page fits.
    """
    page_size = settings.page_size
    if settings.max_total_tokens is not None:
        num_pages = settings.max_total_tokens // page_size
        needed, free = num_pages * page_size * bytes_per_token, _free_bytes(device)
        if needed > free:
            raise ValueError(
                f"max_total_tokens must fit into the free memory of {free / 2**30:.1f} GiB; given "
                f"{settings.max_total_tokens} of {bytes_per_token} bytes, {needed / 2**30:.1f} GiB; lower it or leave it out"
            )
    else:
        per_request = -(-((settings.max_context or model_context) + settings.tree.canonical().verify_width) // page_size)
        fitting = int(_usable_bytes(device, parallel) // (bytes_per_token * page_size))
        num_pages = min(fitting, settings.max_running_requests * per_request)
    own = torch.tensor([num_pages], dtype=torch.int64, device=device)
    num_pages = int(parallel.all_gather(own, dim=0).min())
    if num_pages < 1:
        raise ValueError(
            f"the cache must have room for at least one page of {page_size} tokens; given max_total_tokens="
            f"{settings.max_total_tokens} and {bytes_per_token} bytes a token; raise max_total_tokens or free memory"
        )
    return num_pages


def plan_context(settings: EngineSettings, *, num_pages: int, model_context: int) -> int:
    """Return the most tokens of one request, so that a request that runs alone always fits.

    Raises:
        ValueError: max_context was asked for and does not fit the model or the pool.
    """
    fitting = num_pages * settings.page_size - settings.tree.canonical().verify_width
    limit = min(model_context, fitting)
    if settings.max_context is not None and settings.max_context > limit:
        raise ValueError(
            f"max_context must be at most {limit} (the model's {model_context}; {fitting} fit the cache); "
            f"given {settings.max_context}; lower it or raise max_total_tokens"
        )
    context = settings.max_context or limit
    if settings.max_context == 1:
        raise ValueError("max_context must be at least 2, a prompt token and an output token; given 1; raise it")
    if context < 2:
        raise ValueError(
            f"the cache must hold a prompt token, an output token and one verify step of "
            f"{settings.tree.canonical().verify_width} rows; it has {num_pages} pages of {settings.page_size}; "
            "raise max_total_tokens or lower node_budget"
        )
    return context


def _usable_bytes(device: torch.device, parallel: Parallel) -> float:
    if device.type == "cuda":
        return _free_bytes(device) * CUDA_SHARE
    return _free_bytes(device) * CPU_SHARE / parallel.world_size


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available)
