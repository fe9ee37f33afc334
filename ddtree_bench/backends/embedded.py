"""The embedded backend: `ddtree-bench serve` as a process group of its own, on a free port that it prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_bench.backends.base import TREE_KNOBS, RunningServer, StopReport
from ddtree_bench.backends.launch import GRACE_S, Launched
from ddtree_bench.backends.leases import default_lease_dir
from ddtree_bench.backends.ready import gpu_used_mib, stop_launched, wait_ready
from ddtree_bench.config import ServerSpec, TreeSetting


class EmbeddedBackend:
    """Launches our own server. Every field of a tree setting is a flag of `serve`."""

    name = "embedded"
    knobs = TREE_KNOBS
    can_launch = True
    can_change_tree = False

    def __init__(self, *, lease_dir: Path | None = None, grace_s: float = GRACE_S) -> None:
        self._lease_dir = lease_dir
        self._grace_s = grace_s

    def command(self, server: ServerSpec, setting: TreeSetting, *, port: int) -> list[str]:
        """Return `ddtree-bench serve` with the flags of a server and a setting."""
        flags = ["--model", server.model]
        flags += ["--drafter", server.drafter] if server.drafter and setting.mode != "plain" else []
        flags += setting.flags()
        flags += ["--tensor-parallel", str(server.tensor_parallel), "--device", server.device, "--dtype", server.dtype]
        flags += ["--max-running-requests", str(server.max_running_requests), "--page-size", str(server.page_size)]
        flags += ["--load-format", server.load_format, "--port", str(port)]
        return ["ddtree-bench", "serve", *flags, *server.extra_args]

    def start(self, server: ServerSpec, setting: TreeSetting, workdir: Path) -> RunningServer:
        """Start `serve` under a supervisor and wait until it serves; its output goes to workdir/server.log."""
        return self.start_command(_with_this_python(self.command(server, setting, port=0)), server, workdir)

    def start_command(self, command: Sequence[str], server: ServerSpec, workdir: Path) -> RunningServer:
        """Start a command that prints its URL as `serve` does, and wait until it serves."""
        before = gpu_used_mib()
        launched = Launched(
            command,
            log_path=workdir / "server.log",
            lease_dir=self._lease_dir or default_lease_dir(),
            env=server.env,
            grace_s=self._grace_s,
        )
        try:
            url, model = wait_ready(launched, url=None, timeout_s=server.ready_timeout_s)
        except BaseException:
            launched.stop()
            raise
        return RunningServer.of(launched, url=url, model=model, gpu_used_mib=before)

    def stop(self, running: RunningServer) -> StopReport:
        """Stop the server's group and tell what is left."""
        return stop_launched(running)


def _with_this_python(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ddtree_bench", *command[1:]]
