"""The attach backend: a server that someone else runs. Nothing is started, nothing is stopped."""

from __future__ import annotations

from pathlib import Path

from ddtree_bench.backends.base import TREE_KNOBS, RunningServer, StopReport
from ddtree_bench.backends.ready import prove_serving
from ddtree_bench.config import ServerSpec, TreeSetting


class AttachBackend:
    """Measures at a URL; the setting is whatever that server runs, and is read back rather than chosen."""

    name = "attach"
    knobs = TREE_KNOBS
    can_launch = False
    can_change_tree = False

    def command(self, server: ServerSpec, setting: TreeSetting, *, port: int) -> list[str]:
        """Return no command: there is none to run."""
        return []

    def start(self, server: ServerSpec, setting: TreeSetting, workdir: Path) -> RunningServer:
        """Check that the server at `server.url` serves.

        Raises:
            ServerError: it does not answer.
        """
        if server.url is None:
            raise ValueError('server.url must be given with the backend "attach"; given none')
        url = server.url.rstrip("/").removesuffix("/v1").rstrip("/")
        return RunningServer(url=url, model=prove_serving(url, timeout_s=server.ready_timeout_s))

    def stop(self, running: RunningServer) -> StopReport:
        """Leave the server as it is."""
        return StopReport(detail="not started by us, so not stopped")
