"""A backend whose servers are `ddtree-bench mock` with ranks beside it: launched, supervised and stopped as the embedded one.

Also a program: `python mock_backend.py FILE RESULTS LEASES [MOCK OPTIONS…]` runs a sweep with it, for tests that kill it; with
`--real` the servers are those of the embedded backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ddtree_bench.backends.base import RunningServer
from ddtree_bench.backends.embedded import EmbeddedBackend
from ddtree_bench.config import ServerSpec, SweepSpec, TreeSetting

REAL = "--real"

# a server as the embedded one is built: a parent, ranks, and a parent that ends when a rank does
RANKED = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
front = subprocess.Popen([sys.executable, "-m", "ddtree_bench", "mock", *sys.argv[1:]])
while True:
    for name, process in (("rank", rank), ("front", front)):
        if process.poll() is not None:
            status = process.returncode
            print(f"the {name} process was ended by signal {-status}" if status < 0 else f"{name} exit {status}", flush=True)
            sys.exit(1)
    time.sleep(0.05)
"""


class MockBackend(EmbeddedBackend):
    """`options` go to every mock; `options_of` gives more for a setting, e.g. one that fails."""

    name = "embedded"

    def __init__(self, *, lease_dir: Path, options=(), options_of=lambda setting: (), is_ranked=False):
        super().__init__(lease_dir=lease_dir, grace_s=2.0)
        self.options, self.options_of, self.is_ranked = list(options), options_of, is_ranked
        self.launches: list[TreeSetting] = []

    def start(self, server: ServerSpec, setting: TreeSetting, workdir: Path) -> RunningServer:
        self.launches.append(setting)
        options = [*setting.flags(), *self.options, *self.options_of(setting)]
        head = ["-c", RANKED] if self.is_ranked else ["-m", "ddtree_bench", "mock"]
        return self.start_command([sys.executable, *head, *options], server, workdir)


def make_spec(**tables) -> SweepSpec:
    """Return a small spec for a mock; tables are merged over it."""
    base = {
        "study": {"name": "mock", "trials": 6},
        "server": {"max_running_requests": 4, "ready_timeout_s": 60.0},
        "load": {"num_prompts": 2, "num_warmups": 1, "max_concurrency": 2, "max_tokens": 12},
        "space": {"block_size": [8, 16], "node_budget": [3, 7, 15, 31], "top_k": [4, 8]},
        "gates": {"num_gate_prompts": 1, "gate_max_tokens": 8},
    }
    for name, table in tables.items():
        base[name] = {**base.get(name, {}), **table}
    return SweepSpec.from_dict(base)


def main(file: str, results: str, leases: str, *options: str) -> None:
    """Run or continue a sweep; its exit status is the command line's."""
    from ddtree_bench.sweep.run import run_sweep
    from ddtree_bench.sweep.show import PlainObserver
    from ddtree_bench.trial import Interrupted

    if REAL in options:
        backend = EmbeddedBackend(lease_dir=Path(leases))
    else:
        backend = MockBackend(lease_dir=Path(leases), options=options, is_ranked=True)
    try:
        run_sweep(SweepSpec.from_toml(file), Path(results), backend=backend, observer=PlainObserver(), lease_dir=Path(leases))
    except Interrupted as interrupt:
        sys.exit(interrupt.exit_status)


if __name__ == "__main__":
    main(*sys.argv[1:])
