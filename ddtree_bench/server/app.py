"""The aiohttp application: routes, authentication, and errors as JSON. Generation is in `generation`, life in `run`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from ddtree_bench.engine.request import GenerationRequest, SamplingParams
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.server import generation, info
from ddtree_bench.server.bridge import EngineBridge
from ddtree_bench.server.errors import ApiError
from ddtree_bench.server.fields import Fields
from ddtree_bench.server.metrics import Counters, ServerCollector, exposition
from ddtree_bench.server.protocol import ServedModel, check_model
from ddtree_bench.server.state import STATE, ServerState

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
OPEN_PATHS = ("/health", "/metrics")  # what probes and scrapers ask for without a key, as in SGLang
HEALTH_TIMEOUT_S = 60.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    settings: EngineSettings, model: ServedModel, engine: EngineBridge, counters: Counters, api_key: str | None = None
) -> web.Application:
    """Return the application over an engine that somebody else starts and stops."""
    tree = settings.tree.canonical()
    collector = ServerCollector(
        counters,
        engine.stats,
        model_id=model.model_id,
        num_draft_tokens=tree.num_draft_tokens,
        max_depth=tree.max_depth if tree.num_draft_tokens else 0,
    )
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json, check_key])
    app[STATE] = ServerState(
        settings=settings,
        model=model,
        engine=engine,
        counters=counters,
        collector=collector,
        api_key=api_key,
        created=int(time.time()),
    )
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/health_generate", health_generate),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", one_model),
            web.get("/metrics", metrics),
            web.post("/v1/completions", generation.completions),
            web.post("/v1/chat/completions", generation.chat_completions),
            web.post("/generate", generation.generate),
        ]
    )
    for path in ("/server_info", "/get_server_info"):
        app.router.add_get(path, server_info)
    for path in ("/model_info", "/get_model_info"):
        app.router.add_get(path, model_info)
    for path in ("/abort", "/abort_request"):
        app.router.add_post(path, abort)
    for method in ("GET", "POST"):
        app.router.add_route(method, "/flush_cache", flush_cache)
    return app


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in OpenAI's shape, those of the router too."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        message = f"the body must be at most {MAX_BODY_BYTES} bytes; given more; send several requests"
        return error_response(ApiError(message, status=413))
    except web.HTTPMethodNotAllowed as refused:
        allowed = ", ".join(sorted(refused.allowed_methods))
        message = f"the method of {request.path} must be one of {allowed}; given {request.method}"
        return error_response(ApiError(message, status=405), Allow=allowed)
    except web.HTTPNotFound:
        paths = sorted({resource.canonical for resource in request.app.router.resources()})
        return error_response(ApiError(f"the path must be one of {', '.join(paths)}; given {request.path[:200]}", status=404))


def error_response(error: ApiError, **headers: str) -> web.Response:
    return web.json_response(error.body(), status=error.status, headers=headers)


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask for the API key where one is set, before anything of the request is read."""
    key = request.app[STATE].api_key
    if key is not None and request.path not in OPEN_PATHS:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), key.encode()):
            must = "the header Authorization must be 'Bearer KEY' with the key that the server was started with"
            raise ApiError(f"{must}; given {'another key' if given else 'none'}", status=401, code="invalid_api_key")
    return await handler(request)


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 once a real generation has run and while the engine works."""
    state = request.app[STATE]
    if state.engine.failure is not None:
        return web.json_response({"status": "unavailable", "reason": state.engine.failure}, status=503)
    if not state.has_generated:
        return web.json_response({"status": "starting", "reason": "the first generation has not ended yet"}, status=503)
    return web.json_response({"status": "ok"})


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: 200 after two tokens have gone through the engine now."""
    await generate_probe(request.app[STATE])
    return web.json_response({"status": "ok"})


async def generate_probe(state: ServerState) -> None:
    """Run a small greedy generation, one prefill and at least one round, which no counter sees.

    Raises:
        ApiError: the engine does not answer in time or gives an error.
    """
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    probe = GenerationRequest(request_id=f"probe-{time.monotonic_ns()}", prompt_tokens=(0,), sampling=sampling)
    running = state.engine.open([probe], is_counted=False)
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            async for update in running.updates():
                if update.finish_reason == "abort":
                    raise ApiError("the engine must generate; its generation was aborted; try again", status=503)
    except TimeoutError as error:
        raise ApiError(f"the engine must generate within {HEALTH_TIMEOUT_S:g} s; it has not", status=503) from error
    finally:
        running.close()
    state.has_generated = True


async def models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return web.json_response(info.model_list(state.model, state.created))


async def one_model(request: web.Request) -> web.Response:
    """GET /v1/models/NAME."""
    state = request.app[STATE]
    check_model(Fields({"model": request.match_info["name"]}), state.model)
    return web.json_response(info.model_list(state.model, state.created)["data"][0])


async def metrics(request: web.Request) -> web.Response:
    body = exposition(request.app[STATE].collector)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def server_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    status = state.engine.failure or "ready"
    return web.json_response(info.server_info(state.settings, state.model, state.counters, state.engine.stats(), status))


async def model_info(request: web.Request) -> web.Response:
    return web.json_response(info.model_info(request.app[STATE].model))


async def abort(request: web.Request) -> web.Response:
    """POST /abort and /abort_request: {"rid": …} or {"abort_all": true}; an unknown rid is no error, it may just have ended."""
    fields = Fields(await generation.read_json(request))
    rid, is_all = fields.text("rid"), fields.boolean("abort_all")
    if not rid and not is_all:
        raise fields.error("rid", "the id of a request, or abort_all true", rid)
    found = request.app[STATE].engine.abort(None if is_all else rid)
    return web.json_response({"aborted": found})


async def flush_cache(request: web.Request) -> web.Response:
    """GET or POST /flush_cache: nothing is cached between requests; no counter is reset."""
    return web.Response(text="Nothing to flush: no cache outlives a request.\n")
