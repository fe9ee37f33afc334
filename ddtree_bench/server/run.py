"""The life of one server process: bind, launch, generate once, serve, stop.

The port is bound first, so that one that is taken fails at once; /health answers 503 while the model loads; the URL is printed
when the server is ready. SIGTERM and SIGINT end it: running requests get an error, ranks are stopped, exit status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass, replace

import psutil
from aiohttp import web

from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.errors import ServerError
from ddtree_bench.server.app import generate_probe, make_app
from ddtree_bench.server.bridge import EngineBridge, Launch
from ddtree_bench.server.errors import ApiError
from ddtree_bench.server.info import full_context_requests
from ddtree_bench.server.metrics import Counters
from ddtree_bench.server.protocol import ServedModel
from ddtree_bench.server.state import STATE

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 8.0
CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What one server process is to do. `launch` starts the engine, see EngineBridge."""

    settings: EngineSettings
    model: ServedModel
    launch: Launch
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None


def bind(host: str, port: int) -> socket.socket:
    """Return a listening-to-be socket.

    Raises:
        ServerError: the address cannot be had.
    """
    if not host:  # the system would take it for every interface
        raise ServerError("host must be an address; given an empty one; 0.0.0.0 listens on every interface", kind="bad_host")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ServerError(
            f"host and port must be free to listen on; given {host}:{port}: {error.strerror}; choose another or --port 0",
            kind="port_in_use",
        ) from error
    return sock


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this process have; the default of 1024 is soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def url_of(sock: socket.socket) -> str:
    """Return the URL under which a client on this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def run(plan: ServePlan) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ServerError: the port is taken, or the engine did not start.
    """
    raise_file_limit()
    sock = bind(plan.host, plan.port)
    is_stopped = asyncio.run(serve(plan, sock))
    if not is_stopped:
        log.warning("the engine is still loading or hangs; ending its ranks and this process")
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # its thread is in native code: an orderly exit would wait for it


async def serve(plan: ServePlan, sock: socket.socket) -> bool:
    """Serve until told to stop; True where the engine has stopped in time.

    Raises:
        ServerError: the engine did not start.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    counters = Counters()
    engine = EngineBridge(plan.launch, counters.observe)
    app = make_app(plan.settings, plan.model, engine, counters, plan.api_key)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=1024).start()
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(start(engine, app))
    try:
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            print(url_of(sock), flush=True)
            await stopping
        log.info("stopping")
    finally:
        stopping.cancel()
        starting.cancel()
        is_stopped = await engine.stop(STOP_TIMEOUT_S)
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
    return is_stopped


async def start(engine: EngineBridge, app: web.Application) -> None:
    """Launch the engine and run the first generation.

    Raises:
        ServerError: the first generation failed.
    """
    await engine.start()
    state = app[STATE]
    if engine.handle is not None:
        state.model = replace(state.model, max_context=engine.handle.engine.max_context)
    try:
        await generate_probe(state)
    except ApiError as error:
        raise ServerError(f"the first generation must work; {error.message}", kind="not_ready") from error
    stats, settings = engine.stats(), state.settings
    fitting = full_context_requests(settings, state.model, stats)
    log.info("ready: %s, %d pages of %d tokens", settings.tree.canonical().label(), stats.num_total_pages, settings.page_size)
    if fitting is not None and fitting < settings.max_running_requests:
        log.warning(
            "the cache holds %d requests of %d tokens at once, --max-running-requests is %d: beyond that long requests wait "
            "or start again; raise --max-total-tokens or lower --max-context",
            *(fitting, state.model.max_context, settings.max_running_requests),
        )
