"""The three endpoints that generate: read the body, hand requests to the engine, answer at once or as a stream.

When the client goes away the handler is cancelled (the runner is made with handler_cancellation), and leaving it aborts what
has not finished, so that its pages come back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ddtree_bench.server.bridge import Generation
from ddtree_bench.server.errors import ApiError
from ddtree_bench.server.fields import show
from ddtree_bench.server.protocol import Call, ServedModel, parse_chat, parse_completions, parse_generate
from ddtree_bench.server.responses import FORMATS, Choice, Format
from ddtree_bench.server.state import STATE

Parse = Callable[[Any, ServedModel], Call]
LONG_BODY_BYTES = 65_536


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await answer(request, parse_completions, "completions")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await answer(request, parse_chat, "chat")


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /generate."""
    return await answer(request, parse_generate, "generate")


async def read_json(request: web.Request) -> Any:
    """Return the body's JSON value.

    Raises:
        ApiError: it is not JSON.
    """
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        reason = str(error.__cause__ or error).splitlines()[-1].strip()
        raise ApiError(f"the body must be what its headers tell (Content-Encoding, Content-Length); {reason}") from error
    try:
        return json.loads(raw, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body must be JSON; {str(error) or 'it is nested too deep'}; given {show(raw)}") from error


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


async def answer(request: web.Request, parse: Parse, endpoint: str) -> web.StreamResponse:
    """Answer one call."""
    started_s = time.perf_counter()
    state = request.app[STATE]
    body = await read_json(request)
    if len(await request.read()) < LONG_BODY_BYTES:
        call = parse(body, state.model)
    else:  # tokenizing megabytes takes seconds, in which the other clients must be served
        call = await asyncio.to_thread(parse, body, state.model)
    shape = FORMATS[endpoint](call, state.model, started_s)
    choices = {item.request_id: Choice(index, item) for index, item in enumerate(call.requests)}
    running = state.engine.open(call.requests)
    try:
        if call.is_stream:
            return await send_stream(request, running, shape, choices)
        return await send_whole(running, shape, choices)
    finally:
        running.close()


async def send_whole(running: Generation, shape: Format, choices: dict[str, Choice]) -> web.Response:
    async for update in running.updates():
        choices[update.request_id].add(update)
    return web.json_response(text=dumps(shape.body(list(choices.values()))))


async def send_stream(request: web.Request, running: Generation, shape: Format, choices: dict[str, Choice]) -> web.StreamResponse:
    """Send one event a round and request, then the usage when it is asked for, then [DONE]; an error is an event too."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        async for update in running.updates():
            choice = choices[update.request_id]
            choice.add(update)
            await send_event(response, shape.chunk(choice, update))
        last = shape.last_chunk(list(choices.values()))
        if last is not None:
            await send_event(response, last)
    except ApiError as error:
        await send_event(response, error.body())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def send_event(response: web.StreamResponse, value: Any) -> None:
    await response.write(f"data: {dumps(value)}\n\n".encode())


def dumps(value: Any) -> str:
    """Return compact JSON; a value that is no JSON number is our own mistake and raises."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
