"""The servers of a comparison: kept up side by side and loaded one at a time, or started for each block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.backends import RunningServer, get_backend
from ddtree_bench.compare.arms import DEFAULTS, ArmSpec
from ddtree_bench.errors import ServerError

# What /server_info tells that must not differ between arms, by its names in our server and in SGLang.
COMPARED_INFO = (
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "cuda_graph_max_bs",
    "device",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "dtype",
    "kv_cache_dtype",
    "load_format",
    "max_running_requests",
    "mem_fraction_static",
    "model_path",
    "page_size",
    "quantization",
    "tp_size",
    "version",
)
COMPARED_BLOCK = ("engine", "threads", "is_graphed", "has_overlap", "kernels")  # of our own block "ddtree"


class Servers:
    """Starts arms on demand and stops them all at the end; a context manager.

    Args:
        workdir: folder of the servers' logs.
        keep_up: leave a server running between its blocks (idle servers wait and take no time), else stop it after each.
    """

    def __init__(self, workdir: Path, *, keep_up: bool) -> None:
        self._workdir, self._keep_up = workdir, keep_up
        self._running: dict[str, tuple[ArmSpec, RunningServer]] = {}

    def get(self, arm: ArmSpec) -> RunningServer:
        """Return the arm's server, started if it does not run.

        Raises:
            ServerError: it did not start; names the arm.
        """
        if arm.name in self._running:
            return self._running[arm.name][1]
        backend = get_backend(arm.server.backend)
        folder = self._workdir / f"server-{safe_name(arm.name)}"
        if backend.can_launch:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            running = backend.start(arm.server, arm.setting or DEFAULTS["plain"], folder)
        except ServerError as error:
            raise ServerError(f"arm {arm.name}: {error.reason}", kind=error.kind, log_tail=error.log_tail) from error
        self._running[arm.name] = (arm, running)
        return running

    def is_up(self, arm: ArmSpec) -> bool:
        """Return whether the arm's server runs already."""
        return arm.name in self._running

    def release(self, arm: ArmSpec) -> None:
        """End the use of an arm for now: stop its server unless servers are kept up."""
        if not self._keep_up:
            self._stop(arm.name)

    def _stop(self, name: str) -> None:
        found = self._running.pop(name, None)
        if found is not None:
            get_backend(found[0].server.backend).stop(found[1])

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self._stop(name)


def safe_name(name: str) -> str:
    """Return a name fit for a file: letters, digits, '-', '_' and '.'."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name.removeprefix("http://").removeprefix("https://")).strip(
        "-."
    )


def speculation_label(info: Mapping[str, Any]) -> str | None:
    """Return how a server that someone else runs speculates, by SGLang's fields; None where it tells nothing."""
    algorithm = info.get("speculative_algorithm")
    if not algorithm:
        return None
    words = [str(algorithm)]
    for field, form in (
        ("speculative_num_steps", "{} steps"),
        ("speculative_eagle_topk", "top-k {}"),
        ("speculative_num_draft_tokens", "verify width {}"),
    ):
        words += [form.format(info[field])] if info.get(field) is not None else []
    return ", ".join(words)


def flat_config(arm: ArmSpec, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal between arms: how the server was asked for, and what it tells of itself; unknown is left out."""
    told = {key: info[key] for key in COMPARED_INFO if info.get(key) is not None}
    block = info.get("ddtree") or {}
    told |= {key: block[key] for key in COMPARED_BLOCK if block.get(key) is not None}
    asked: dict[str, Any] = {"mode": arm.setting.mode if arm.setting is not None else None}
    if arm.server.backend != "attach":
        server = arm.server
        asked |= {"backend": server.backend, "model": server.model, "drafter": server.drafter, "dtype": server.dtype}
        asked |= {"tensor_parallel": server.tensor_parallel, "device": server.device, "page_size": server.page_size}
        asked |= {"max_running_requests": server.max_running_requests, "load_format": server.load_format}
        asked |= {"extra_args": list(server.extra_args), "env": dict(server.env)}
    return {**told, **asked}
