"""Sends one request over HTTP and gives its record; a streaming client on aiohttp.

One session for a whole load: connections are reused, the pool has no limit, the read buffer is large, nothing is retried.
Arrival times are taken when a packet reaches the program. What the bytes mean is `recorder`'s.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ddtree_bench.config import LoadSpec
from ddtree_bench.load.recorder import StreamRecorder
from ddtree_bench.load.workloads import Prompt
from ddtree_bench.records import RequestRecord

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/generate"}
_READ_BUFFER_BYTES = 4 * 1024 * 1024
_DRAIN_TIMEOUT_S = 1.0  # wait for the end of a body after [DONE], so that its connection can be used again


def server_root(base_url: str) -> str:
    """Return the server's root for a base URL with or without `/v1` or a trailing slash.

    Raises:
        ValueError: the URL has no http scheme, no host or no possible port.
    """
    root = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(root)
        is_ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, a port that is no number from 0 to 65535
        is_ok = False
    if not is_ok:
        raise ValueError(
            f"base_url must begin with http:// or https:// and name a host, and a possible port if any; given {base_url!r}"
        )
    return root


def auth_headers(api_key: str | None, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of every request: the key as a bearer token, then the caller's own."""
    return {**({"Authorization": f"Bearer {api_key}"} if api_key else {}), **(headers or {})}


def make_session(api_key: str | None = None, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Return the session of a load; the caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=60.0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=_READ_BUFFER_BYTES,
        headers={"Accept-Encoding": "identity", **auth_headers(api_key, headers)},
        trust_env=False,
    )


def request_body(
    spec: LoadSpec, prompt: Prompt, *, model: str | None, extra_body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON body of one request; keys of `extra_body` win."""
    max_tokens = prompt.output_tokens or spec.max_tokens
    seed = prompt.seed(spec.seed)
    if spec.endpoint == "generate":
        sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": spec.temperature, "sampling_seed": seed}
        if spec.ignore_eos:
            sampling["ignore_eos"] = True
        return {"text": prompt.as_text(), "sampling_params": sampling, "stream": True, **(extra_body or {})}
    body: dict[str, Any] = {} if model is None else {"model": model}
    body |= {"messages": prompt.as_messages()} if spec.endpoint == "chat" else {"prompt": prompt.as_text()}
    body |= {"max_tokens": max_tokens, "temperature": spec.temperature, "seed": seed, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if spec.ignore_eos:
        body["ignore_eos"] = True
    return body | dict(extra_body or {})


@dataclass(frozen=True, kw_only=True)
class Client:
    """Sends requests of one load spec to one server; holds no state but the session it is lent."""

    session: aiohttp.ClientSession
    root: str
    spec: LoadSpec
    model: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    async def send(self, prompt: Prompt, *, request_id: str, planned_s: float | None = None) -> RequestRecord:
        """Send one request, read its reply to the end, return its record; a failure is a record, never an exception.

        Cancelling the task gives a record of kind `cancelled`; the caller who cancels awaits it.
        """
        body = json.dumps(request_body(self.spec, prompt, model=self.model, extra_body=self.extra_body)).encode()
        recorder = StreamRecorder(
            self.spec.endpoint, request_id=request_id, prompt_id=prompt.prompt_id, class_=prompt.class_, planned_s=planned_s
        )
        recorder.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self.spec.timeout_s):
                return await self._exchange(recorder, body)
        except TimeoutError:
            reason = f"no end of the reply within {self.spec.timeout_s:g} s"
            return recorder.fail("timeout", reason, time.monotonic())
        except asyncio.CancelledError:
            return recorder.fail("cancelled", "the load was stopped before the reply ended", time.monotonic())

    async def _exchange(self, recorder: StreamRecorder, body: bytes) -> RequestRecord:
        url, headers = self.root + PATHS[self.spec.endpoint], {"Content-Type": "application/json"}
        try:
            response = await self.session.post(url, data=body, headers=headers, allow_redirects=False)
        except aiohttp.ClientError as error:
            return recorder.fail("connect", f"{type(error).__name__}: {error}", time.monotonic())
        async with response:
            try:
                if response.status != 200:
                    return recorder.refuse(response.status, await response.read(), time.monotonic())
                async for data in response.content.iter_any():
                    recorder.feed(time.monotonic(), data)
                    if recorder.is_over:
                        await _drain(response)
                        break
            except (aiohttp.ClientError, ConnectionError) as error:
                return recorder.fail("truncated", f"the connection broke inside the reply: {error}", time.monotonic())
            return recorder.finish(time.monotonic())


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read a body to its end so that the connection can be used again; one that does not end is closed."""
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            async for _ in response.content.iter_any():
                pass
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        response.close()


async def first_model(session: aiohttp.ClientSession, root: str, *, timeout_s: float = 10.0) -> str | None:
    """Return the first id of /v1/models; None where the server has no such list."""
    try:
        async with asyncio.timeout(timeout_s), session.get(root + "/v1/models") as response:
            if response.status != 200:
                return None
            listing = await response.json(content_type=None)
    except (TimeoutError, aiohttp.ClientError, ValueError):
        return None
    rows = listing.get("data") if isinstance(listing, dict) else None
    first = rows[0] if isinstance(rows, list) and rows else None
    return str(first["id"]) if isinstance(first, dict) and "id" in first else None
