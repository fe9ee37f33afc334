"""Backends: start (or attach to) a server for a tree setting, return its URL, stop it without a trace."""

from __future__ import annotations

import importlib

from ddtree_bench.backends.base import Backend, RunningServer, StopReport, refuse_ignored_knobs
from ddtree_bench.errors import unknown_name

_MEMBERS = {"embedded": "EmbeddedBackend", "sglang": "SglangBackend", "attach": "AttachBackend"}

__all__ = ["Backend", "RunningServer", "StopReport", "get_backend", "refuse_ignored_knobs"]


def get_backend(name: str) -> Backend:
    """Return the backend of a name; its module is imported now.

    Raises:
        ValueError: unknown name.
    """
    if name not in _MEMBERS:
        raise unknown_name("server.backend", name, _MEMBERS)
    backend: Backend = getattr(importlib.import_module(f"ddtree_bench.backends.{name}"), _MEMBERS[name])()
    return backend
