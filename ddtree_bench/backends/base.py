"""What a backend is: it starts a server for one tree setting, waits until it truly serves, and stops it without a trace.

A backend owns the command line and the knobs that its server honours. It measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddtree_bench.backends.launch import Launched, log_tail
from ddtree_bench.config import SPACE_KEYS, ServerSpec, TreeSetting
from ddtree_bench.errors import ServerError


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that answers. `launched` is None for one that someone else runs; pid and pgid are then None too."""

    url: str
    model: str
    pid: int | None = None
    pgid: int | None = None
    log_path: Path | None = None
    command: tuple[str, ...] = ()
    launched: Launched | None = None
    gpu_used_mib: tuple[int, ...] | None = None

    @classmethod
    def of(cls, launched: Launched, *, url: str, model: str, gpu_used_mib: tuple[int, ...] | None) -> RunningServer:
        """Return a server that was launched; `gpu_used_mib` is what was in use before."""
        return cls(
            url=url,
            model=model,
            pid=launched.pid,
            pgid=launched.pgid,
            log_path=launched.log_path,
            command=launched.command,
            launched=launched,
            gpu_used_mib=gpu_used_mib,
        )

    def check(self, *, wait_s: float = 0.0) -> None:
        """Return if the server still runs; with `wait_s` an exit that is on its way is waited for, after a failed request.

        Raises:
            ServerError: its first process has ended; the kind is from its status and its log.
        """
        if self.launched is None:
            return
        deadline = time.monotonic() + wait_s
        while self.launched.poll() is None:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)
        raise exit_error(self.launched, "the server must run until it is stopped")


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """What was left after a stop; None where it cannot be known. `was_killed`: SIGTERM was not enough."""

    is_group_empty: bool | None = None
    is_port_free: bool | None = None
    is_gpu_memory_back: bool | None = None
    was_killed: bool | None = None
    detail: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is known to be left."""
        return False not in (self.is_group_empty, self.is_port_free, self.is_gpu_memory_back)


class Backend(Protocol):
    """A family of servers. `knobs` are the fields of a tree setting that its server honours, by mode."""

    name: str
    knobs: Mapping[str, frozenset[str]]
    can_launch: bool
    can_change_tree: bool

    def command(self, server: ServerSpec, setting: TreeSetting, *, port: int) -> list[str]:
        """Return the command that serves a setting; a person can run it as well."""
        ...

    def start(self, server: ServerSpec, setting: TreeSetting, workdir: Path) -> RunningServer:
        """Start a server and return once it is ready (health, model id, one real generation).

        Raises:
            ServerError: it did not become ready; carries the log's last lines.
        """
        ...

    def stop(self, running: RunningServer) -> StopReport:
        """Stop the server and tell what is left of it."""
        ...


TREE_KNOBS: Mapping[str, frozenset[str]] = {
    "plain": frozenset(),
    "linear": frozenset({"block_size", "depth"}),
    "tree": frozenset(SPACE_KEYS),
}


def refuse_ignored_knobs(backend: Backend, mode: str, searched: Collection[str]) -> None:
    """Return if the backend honours every knob that is searched.

    Raises:
        ValueError: a mode or a knob that its server would ignore.
    """
    if mode not in backend.knobs:
        raise ValueError(
            f"server.mode must be one that the backend {backend.name!r} can run ({', '.join(backend.knobs)}); given {mode!r}"
        )
    ignored = sorted(set(searched) - backend.knobs[mode])
    if ignored:
        honoured = ", ".join(sorted(backend.knobs[mode])) or "none"
        raise ValueError(
            f"[space] must hold knobs that the backend {backend.name!r} honours in mode {mode!r} ({honoured}); "
            f"given {', '.join(ignored)}: the server would ignore them"
        )


def exit_error(launched: Launched, must: str) -> ServerError:
    """Return the error for a server that ended by itself, its kind read from status and log."""
    from ddtree_bench.backends.failures import kind_of_exit

    ended = launched.exit
    status = 0 if ended is None else ended.status
    how = f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
    reason = f" ({ended.reason})" if ended is not None and ended.reason else ""
    lines = log_tail(launched.log_path)
    return ServerError(f"{must}; {how}{reason}", kind=kind_of_exit(status, log_tail(launched.log_path, 200)), log_tail=lines)
