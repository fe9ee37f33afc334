"""A server that answers like one: replays a script of rounds over HTTP, without a model.

For tests of clients and sweeps, and for a client's own error. It speaks what the embedded server speaks (DESIGN 4.3): its
replies depend only on the prompt (and on the seed at temperature > 0), whatever the speculation, and its counts obey
output_tokens = 1 + num_accepted + num_verify_steps − num_cut. Faults are knobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ddtree_bench.config import TreeSetting
from ddtree_bench.errors import unknown_name

FAULTS = ("none", "http_503", "in_band_error", "truncated", "empty", "html", "broken_json", "hang")
USAGES = ("continuous", "final", "none")
DIALECTS = ("vllm", "sglang", "both", "none")
_WORDS = ("node", "tree", "root", "leaf", "path", "walk", "mask", "draft", "token", "block", "depth", "chain", "batch", "round")


@dataclass(frozen=True, kw_only=True)
class MockSpec:
    """What the server does.

    `acceptance_length` (bonus counted) sets the tokens of a round; None gives plain decoding, one token a chunk and no
    counts. Durations in milliseconds. `fault` strikes every `fault_every`-th generation request (1: all).
    `exit_after` ends the process with `exit_code` when that many generation requests have come, after writing `log_text` to
    stderr; 0 ends it at the start. `start_delay_s` is how long /health answers 503 after the start; inf is never ready.
    `bends_text_every` changes the text of every n-th request, as a lossy engine would.
    """

    acceptance_length: float | None = 3.2
    setting: TreeSetting = field(default_factory=TreeSetting)
    ms_per_round: float = 5.0
    first_token_ms: float = 10.0
    reply_tokens: int | None = None
    model: str = "mock"
    api_key: str | None = None
    usage: str = "continuous"
    metrics: str = "both"
    has_meta_info: bool = True
    has_models: bool = True
    has_server_info: bool = True
    fault: str = "none"
    fault_every: int = 1
    bends_text_every: int = 0
    start_delay_s: float = 0.0
    exit_after: int | None = None
    exit_code: int = 1
    log_text: str = ""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("fault", self.fault, FAULTS),
            ("usage", self.usage, USAGES),
            ("metrics", self.metrics, DIALECTS),
        ):
            if value not in known:
                raise unknown_name(name, value, known)
        for name in ("ms_per_round", "first_token_ms"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0; given {getattr(self, name)!r}")
        for name, least in (("fault_every", 1), ("bends_text_every", 0), ("reply_tokens", 1), ("exit_after", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; given {getattr(self, name)!r}")
        if not self.start_delay_s >= 0:
            raise ValueError(f"start_delay_s must be at least 0; given {self.start_delay_s!r}")
        if self.acceptance_length is not None and not self.acceptance_length >= 1:
            raise ValueError(f"acceptance_length must be at least 1 (the bonus is counted); given {self.acceptance_length!r}")


def acceptance_of_setting(setting: TreeSetting) -> float | None:
    """Return an acceptance length that grows with the tree and levels off; None for plain decoding."""
    if setting.mode == "plain":
        return None
    chain = sum(0.72**depth for depth in range(1, setting.max_depth + 1))
    if setting.mode == "linear":
        return 1.0 + chain
    if setting.node_budget == 0:
        return 1.0
    width = min(setting.top_k, setting.branching or setting.top_k, 8)
    return 1.0 + min(setting.node_budget, chain * (1.0 + 0.12 * math.log2(width)) * (1.0 - math.exp(-setting.node_budget / 9.0)))


def ms_per_round_of_setting(setting: TreeSetting, ms_per_round: float) -> float:
    """Return the time of a round that grows with the verify width, so that a best budget lies inside."""
    return ms_per_round * (1.0 + 0.012 * setting.num_draft_tokens + 0.0004 * setting.num_draft_tokens**2)


@dataclass(frozen=True, kw_only=True)
class Script:
    """One reply: the tokens of each chunk, the walk of each verify step, and what the length cap cut."""

    chunks: tuple[tuple[str, ...], ...]
    accepted: tuple[int, ...]
    num_cut: int

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def histogram(self) -> list[int]:
        """Steps by num_accepted."""
        counts = [0] * (max(self.accepted, default=0) + 1)
        for accepted in self.accepted:
            counts[accepted] += 1
        return counts


def write_script(spec: MockSpec, prompt: str, *, max_tokens: int, temperature: float = 0.0, seed: int = 0) -> Script:
    """Write a reply: the first token from prefill, then rounds of accepted tokens and a bonus, cut at the length cap.

    Rounds carry the remainder of the acceptance length on, so that long replies come close to it; where in that cycle a
    reply begins depends on its prompt.
    """
    num_tokens = max_tokens if spec.reply_tokens is None else min(max_tokens, spec.reply_tokens)
    key = prompt if temperature == 0 else f"{prompt}\0{seed}\0{temperature}"
    digest = hashlib.sha256(key.encode()).digest()
    tokens = [f"{_WORDS[digest[i % 32] % len(_WORDS)]}{(digest[(i * 7) % 32] + i * 31) % 997} " for i in range(num_tokens)]
    accepted_mean = (spec.acceptance_length or 1.0) - 1.0
    phase = digest[0] / 256.0
    chunks, accepted = [tuple(tokens[:1])], []
    done, step = 1, 0
    while done < num_tokens:
        walked = math.floor((step + 1) * accepted_mean + phase) - math.floor(step * accepted_mean + phase)
        chunks.append(tuple(tokens[done : done + walked + 1]))
        accepted.append(walked)
        done += walked + 1
        step += 1
    return Script(chunks=tuple(chunks), accepted=tuple(accepted), num_cut=max(done - num_tokens, 0))


class MockServer:
    """The application and its counters; `app()` gives something that aiohttp can run."""

    def __init__(self, spec: MockSpec | None = None) -> None:
        self.spec = spec or MockSpec()
        self.num_generations = 0
        self.num_in_flight = 0
        self.peak_in_flight = 0
        self.bodies: list[dict[str, Any]] = []
        self.totals = dict.fromkeys(("requests", "prompt_tokens", "output_tokens", "steps", "accepted", "drafts"), 0)
        self._per_position: dict[int, int] = {}
        self._started_s = time.monotonic()

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._authorise], client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/get_server_info", self._server_info)
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            app.router.add_post(path, self._generate)
        app.router.add_post("/abort", self._abort)
        return app

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = self.spec.api_key
        if key is not None and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {key}":
            return _error(401, "the API key must be given as a bearer token")
        return await handler(request)

    @property
    def is_ready(self) -> bool:
        """Whether /health answers 200."""
        return time.monotonic() - self._started_s >= self.spec.start_delay_s

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}) if self.is_ready else _error(503, "loading")

    async def _models(self, _: web.Request) -> web.Response:
        if not self.spec.has_models:
            return _error(404, "not found")
        return web.json_response({"object": "list", "data": [{"id": self.spec.model, "object": "model", "owned_by": "mock"}]})

    async def _abort(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _server_info(self, _: web.Request) -> web.Response:
        if not self.spec.has_server_info:
            return _error(404, "not found")
        setting = self.spec.setting
        info = {
            "backend": "mock",
            "model": self.spec.model,
            "mode": setting.mode,
            "block_size": setting.block_size,
            "depth": setting.depth,
            "top_k": setting.top_k,
            "branching": setting.branching,
            "node_budget": setting.node_budget,
            "draft_temperature": setting.draft_temperature,
            "verify_width": setting.verify_width,
            "max_running_requests": 1024,
            "effective_max_running_requests": 1024,
            "internal_states": [{}],
        }
        if self.totals["steps"]:
            info["internal_states"] = [{"avg_spec_accept_length": 1 + self.totals["accepted"] / self.totals["steps"]}]
        return web.json_response(info)

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.spec.metrics == "none":
            return _error(404, "not found")
        return web.Response(text="".join(f"{line}\n" for line in self._metric_lines()), content_type="text/plain")

    def _metric_lines(self) -> Iterator[str]:
        totals, is_speculative = self.totals, self.spec.acceptance_length is not None
        if self.spec.metrics in ("vllm", "both"):
            names = {"prompt_tokens": "prompt_tokens", "generation_tokens": "output_tokens", "request_success": "requests"}
            if is_speculative:
                names |= {
                    "spec_decode_num_drafts": "steps",
                    "spec_decode_num_draft_tokens": "drafts",
                    "spec_decode_num_accepted_tokens": "accepted",
                }
            for name, ours in names.items():
                yield f"# TYPE vllm:{name} counter"
                yield f'vllm:{name}_total{{model_name="{self.spec.model}"}} {totals[ours]}'
            if is_speculative:
                yield "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter"
                for position, count in sorted(self._per_position.items()):
                    yield f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {count}'
        if self.spec.metrics in ("sglang", "both"):
            names = {"generation_tokens": "output_tokens", "prompt_tokens": "prompt_tokens", "num_requests": "requests"}
            if is_speculative:
                names |= {"spec_verify_calls": "steps"}
            for name, ours in names.items():
                yield f"# TYPE sglang:{name}_total counter"
                yield f'sglang:{name}_total{{model_name="{self.spec.model}"}} {totals[ours]}'

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            return _error(400, f"the body must be JSON; {error}")
        self.bodies.append(body)
        self.num_generations += 1
        spec, number = self.spec, self.num_generations
        if spec.exit_after is not None and number >= spec.exit_after:
            leave(spec)
        self.num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.num_in_flight)
        try:
            fault = spec.fault if number % spec.fault_every == 0 else "none"
            if fault == "http_503":
                return _error(503, "overloaded")
            if not self.is_ready:
                return _error(503, "loading")
            return await _Reply(self, request, body, fault, number).send()
        finally:
            self.num_in_flight -= 1

    def count(self, script: Script, prompt_tokens: int) -> None:
        """Add one finished reply to the counters."""
        totals = self.totals
        totals["requests"] += 1
        totals["prompt_tokens"] += prompt_tokens
        totals["output_tokens"] += script.num_tokens
        if self.spec.acceptance_length is None:
            return
        totals["steps"] += len(script.accepted)
        totals["accepted"] += sum(script.accepted)
        totals["drafts"] += len(script.accepted) * self.num_draft_tokens(script)
        for walked in script.accepted:
            for position in range(walked):
                self._per_position[position] = self._per_position.get(position, 0) + 1

    def num_draft_tokens(self, script: Script) -> int:
        """Draft tokens of a step: the setting's, or what the walk needs where a test asks for more."""
        return max(self.spec.setting.num_draft_tokens, max(script.accepted, default=0))


class _Reply:
    """Streams one reply, or gives it whole."""

    def __init__(self, server: MockServer, request: web.Request, body: Mapping[str, Any], fault: str, number: int) -> None:
        self._server, self._spec, self._request, self._body, self._fault = server, server.spec, request, body, fault
        self._endpoint = {"/generate": "generate", "/v1/completions": "completions"}.get(request.path, "chat")
        self._id = f"mock-{number}"
        sampling = body.get("sampling_params") or {} if self._endpoint == "generate" else body
        prompt = _prompt_text(body)
        bend = server.spec.bends_text_every
        key = prompt + ("\0bent" if bend and number % bend == 0 else "")
        self._prompt_tokens = max(len(prompt) // 4, 1)
        self._script = write_script(
            server.spec,
            key,
            max_tokens=int(sampling.get("max_new_tokens") or body.get("max_tokens") or body.get("max_completion_tokens") or 128),
            temperature=float(sampling.get("temperature") or 0.0),
            seed=int(sampling.get("seed") or sampling.get("sampling_seed") or 0),
        )
        is_cut = server.spec.reply_tokens is None or self._script.num_tokens < server.spec.reply_tokens
        self._finish_reason = "length" if is_cut else "stop"

    async def send(self) -> web.StreamResponse:
        if self._fault == "html":
            return web.Response(text="<html><body>502 Bad Gateway</body></html>", content_type="text/html")
        if not self._body.get("stream"):
            await asyncio.sleep(self._spec.first_token_ms / 1000 + len(self._script.accepted) * self._spec.ms_per_round / 1000)
            self._server.count(self._script, self._prompt_tokens)
            return web.json_response(self._whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(self._request)
        await self._stream(response)
        await response.write_eof()
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        if self._fault == "hang":
            await asyncio.sleep(3600)
        if self._fault == "empty":
            await response.write(b"data: [DONE]\n\n")
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._spec.first_token_ms / 1000
        chunks = self._script.chunks
        num_sent, text = 0, ""
        if self._endpoint == "chat":
            await response.write(self._event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, 0))
        for number, chunk in enumerate(chunks):
            await asyncio.sleep(max(due_s - loop.time(), 0))
            due_s += self._spec.ms_per_round / 1000
            if self._fault != "none" and number == min(1, len(chunks) - 1):
                await self._break(response)
                return
            num_sent += len(chunk)
            text += "".join(chunk)
            is_last = number == len(chunks) - 1
            await response.write(self._chunk("".join(chunk), text, num_sent, self._finish_reason if is_last else None))
        self._server.count(self._script, self._prompt_tokens)
        if self._endpoint != "generate" and self._wants_usage():
            await response.write(self._event(None, num_sent))
        await response.write(b"data: [DONE]\n\n")

    async def _break(self, response: web.StreamResponse) -> None:
        if self._fault == "in_band_error":
            await response.write(b'data: {"error": {"message": "CUDA out of memory", "type": "server_error", "code": 500}}\n\n')
        elif self._fault == "broken_json":
            await response.write(b'data: {"choices": [{"index": 0, "delta": \n\n')
        elif self._fault == "truncated" and self._request.transport is not None:
            self._request.transport.abort()

    def _wants_usage(self) -> bool:
        return self._spec.usage != "none" and bool((self._body.get("stream_options") or {}).get("include_usage"))

    def _chunk(self, delta: str, text: str, num_sent: int, finish_reason: str | None) -> bytes:
        if self._endpoint == "generate":
            return _sse({"text": text, "meta_info": self._meta(num_sent, finish_reason)})
        choice: dict[str, Any] = {"finish_reason": finish_reason}
        choice |= {"delta": {"content": delta}} if self._endpoint == "chat" else {"text": delta}
        return self._event(choice, num_sent)

    def _event(self, choice: dict[str, Any] | None, num_sent: int) -> bytes:
        message = self._envelope(is_chunk=True)
        message["choices"] = [] if choice is None else [{"index": 0, **choice}]
        options = self._body.get("stream_options") or {}
        is_continuous = self._spec.usage == "continuous" and options.get("continuous_usage_stats")
        if self._wants_usage() and (choice is None or is_continuous):
            message["usage"] = self._usage(num_sent)
        is_end = choice is None or (choice.get("finish_reason") is not None and not self._wants_usage())
        if is_end and self._has_counts():
            message["meta_info"] = self._meta(num_sent, self._finish_reason)
        return _sse(message)

    def _whole(self) -> dict[str, Any]:
        text, count = "".join("".join(chunk) for chunk in self._script.chunks), self._script.num_tokens
        if self._endpoint == "generate":
            return {"text": text, "meta_info": self._meta(count, self._finish_reason)}
        message = self._envelope(is_chunk=False)
        part = {"message": {"role": "assistant", "content": text}} if self._endpoint == "chat" else {"text": text}
        message["choices"] = [{"index": 0, **part, "finish_reason": self._finish_reason}]
        message["usage"] = self._usage(count)
        if self._has_counts():
            message["meta_info"] = self._meta(count, self._finish_reason)
        return message

    def _envelope(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if self._endpoint == "completions" else "chat.completion" + (".chunk" if is_chunk else "")
        return {"id": self._id, "object": kind, "created": int(time.time()), "model": self._spec.model}

    def _usage(self, num_sent: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": num_sent,
            "total_tokens": self._prompt_tokens + num_sent,
        }

    def _has_counts(self) -> bool:
        return self._spec.has_meta_info and self._spec.acceptance_length is not None

    def _meta(self, num_sent: int, finish_reason: str | None) -> dict[str, Any]:
        script = self._script
        meta: dict[str, Any] = {"id": self._id, "prompt_tokens": self._prompt_tokens, "completion_tokens": num_sent}
        meta["finish_reason"] = None if finish_reason is None else {"type": finish_reason}
        if finish_reason is not None and self._has_counts():
            steps = len(script.accepted)
            meta |= {
                "spec_verify_ct": steps,
                "spec_num_correct_drafts": sum(script.accepted),
                "spec_num_proposed_drafts": steps * self._server.num_draft_tokens(script),
                "spec_correct_drafts_histogram": script.histogram if steps else [],
                "spec_accept_length": num_sent / steps if steps else 0.0,
                "num_cut": script.num_cut,
            }
        return meta


def _prompt_text(body: Mapping[str, Any]) -> str:
    if "messages" in body:
        return "\n".join(str(message.get("content")) for message in body["messages"])
    return str(body.get("prompt", body.get("text", "")))


def _sse(message: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def leave(spec: MockSpec) -> None:
    """End the process at once as a crashed server does: its last words on stderr, its exit code."""
    if spec.log_text:
        print(spec.log_text, file=sys.stderr, flush=True)
    os._exit(spec.exit_code)


async def start(server: MockServer, *, host: str = "127.0.0.1", port: int = 0) -> tuple[web.AppRunner, str]:
    """Start serving; return the runner to clean up and the URL."""
    runner = web.AppRunner(server.app(), shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port, reuse_address=True)
    await site.start()
    bound = runner.addresses[0][1]
    return runner, f"http://{host}:{bound}"
