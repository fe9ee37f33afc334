"""What the handlers of one server share."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.server.bridge import EngineBridge
from ddtree_bench.server.metrics import Counters, ServerCollector
from ddtree_bench.server.protocol import ServedModel


@dataclass
class ServerState:
    """One server. `has_generated` turns true when the first generation has gone through the engine."""

    settings: EngineSettings
    model: ServedModel
    engine: EngineBridge
    counters: Counters
    collector: ServerCollector
    api_key: str | None
    created: int
    has_generated: bool = False


STATE = web.AppKey("state", ServerState)
