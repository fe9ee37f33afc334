"""The SGLang backend: plain decoding and linear DFLASH drafting with the flags that SGLang has.

Trees need the DDTREE algorithm, which the plugin of this package will register; until then mode "tree" is refused.
SGLang's `speculative_num_draft_tokens` counts the root: for a chain it is the block size.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from ddtree_bench.backends.base import RunningServer, StopReport
from ddtree_bench.backends.launch import GRACE_S, Launched
from ddtree_bench.backends.leases import default_lease_dir
from ddtree_bench.backends.ready import free_port, gpu_used_mib, stop_launched, wait_ready
from ddtree_bench.config import ServerSpec, TreeSetting
from ddtree_bench.errors import MissingPackageError


class SglangBackend:
    """Launches `sglang.launch_server`; a chain is as deep as its block, so depth is no knob of it."""

    name = "sglang"
    knobs: Mapping[str, frozenset[str]] = {"plain": frozenset(), "linear": frozenset({"block_size"})}
    can_launch = True
    can_change_tree = False

    def command(self, server: ServerSpec, setting: TreeSetting, *, port: int) -> list[str]:
        """Return SGLang's command line for a setting.

        Raises:
            ValueError: mode "tree", a chain shorter than its block, a device other than cuda, or no drafter.
        """
        if setting.mode == "tree":
            raise ValueError(
                'mode must be plain or linear with the backend "sglang"; given "tree": SGLang has no DDTREE algorithm and '
                'this version has no plugin that registers it; use the backend "embedded"'
            )
        if server.device != "cuda":
            raise ValueError(f'server.device must be "cuda" with the backend "sglang"; given {server.device!r}')
        flags = ["--model-path", server.model, "--tp-size", str(server.tensor_parallel), "--dtype", server.dtype]
        flags += ["--max-running-requests", str(server.max_running_requests), "--page-size", str(server.page_size)]
        flags += ["--load-format", server.load_format, "--host", "127.0.0.1", "--port", str(port)]
        if setting.mode == "linear":
            flags += _linear_flags(server, setting)
        return ["python", "-m", "sglang.launch_server", *flags, *server.extra_args]

    def start(self, server: ServerSpec, setting: TreeSetting, workdir: Path) -> RunningServer:
        """Start SGLang on a free port and wait until it serves.

        Raises:
            MissingPackageError: SGLang is not installed.
        """
        port = free_port()
        command = [sys.executable, *self.command(server, setting, port=port)[1:]]
        if importlib.util.find_spec("sglang") is None:
            raise MissingPackageError("sglang", "sglang", 'the backend "sglang"')
        before, url = gpu_used_mib(), f"http://127.0.0.1:{port}"
        log = workdir / "server.log"
        launched = Launched(command, log_path=log, lease_dir=default_lease_dir(), env=server.env, grace_s=2 * GRACE_S)
        try:
            url, model = wait_ready(launched, url=url, timeout_s=server.ready_timeout_s)
        except BaseException:
            launched.stop()
            raise
        return RunningServer.of(launched, url=url, model=model, gpu_used_mib=before)

    def stop(self, running: RunningServer) -> StopReport:
        """Stop the server's group and tell what is left."""
        return stop_launched(running)


def _linear_flags(server: ServerSpec, setting: TreeSetting) -> list[str]:
    if server.drafter is None:
        raise ValueError('server.drafter must name a DFlash checkpoint with the backend "sglang"; given none')
    if setting.depth is not None and setting.depth < setting.block_size - 1:
        raise ValueError(f"depth must be block_size - 1 = {setting.block_size - 1} for SGLang's chain; given {setting.depth}")
    flags = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", server.drafter]
    return [*flags, "--speculative-num-draft-tokens", str(setting.block_size)]
