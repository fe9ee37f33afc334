"""The engine behind an asyncio face: requests in, updates out to whoever waits for them in the event loop.

The engine has a thread of its own and calls back from it; here each callback becomes one call in the event loop, so that all
state of this module is touched by the loop alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate
from ddtree_bench.errors import ServerError
from ddtree_bench.server.errors import ApiError, EngineUnavailable

log = logging.getLogger(__name__)

STOPPING = "the server is stopping"


class EngineLike(Protocol):
    """What does not change while an engine runs."""

    @property
    def max_context(self) -> int: ...
    def refusal(self, request: GenerationRequest) -> str | None: ...


class HandleLike(Protocol):
    """What the server needs of `ddtree_bench.engine.handle.EngineHandle`; every method may be called from the event loop."""

    @property
    def engine(self) -> EngineLike: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...


OnUpdates = Callable[[Sequence[GenerationUpdate]], None]
OnFailure = Callable[[ServerError], None]
Launch = Callable[[OnUpdates, OnFailure], HandleLike]
Observer = Callable[[GenerationUpdate], None]


class EngineBridge:
    """One engine and the requests that it holds.

    Args:
        launch: starts the engine, given what to call with updates and on failure; blocks until it can take requests.
        observe: called with each update of a counted request, before a client gets it.
    """

    def __init__(self, launch: Launch, observe: Observer = lambda update: None) -> None:
        self.failure: str | None = "the engine is loading"
        self.handle: HandleLike | None = None
        self._launch = launch
        self._observe = observe
        self._open: dict[str, Generation] = {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launch")
        self._has_begun = False

    async def start(self) -> None:
        """Launch the engine and return when it can take requests.

        Raises:
            ValueError: the settings do not fit the checkpoints or the machine.
            ServerError: it did not start.
        """
        loop = asyncio.get_running_loop()
        self._has_begun = True

        def on_updates(updates: Sequence[GenerationUpdate]) -> None:
            loop.call_soon_threadsafe(self._deliver, updates)

        def on_failure(error: ServerError) -> None:
            loop.call_soon_threadsafe(self._fail, error.reason)

        self.handle = await loop.run_in_executor(self._executor, self._launch, on_updates, on_failure)
        self.failure = None

    def open(self, requests: Sequence[GenerationRequest], *, is_counted: bool = True) -> Generation:
        """Hand requests to the engine; the caller must `close` what this returns.

        Raises:
            EngineUnavailable: the engine is loading, has failed, or is stopping.
            ApiError: it refuses a request, or its id is in use; then none of them runs.
        """
        if self.failure is not None or self.handle is None:
            raise EngineUnavailable(self.failure or STOPPING)
        for request in requests:
            if request.request_id in self._open:
                raise ApiError(f"rid must not be one that is running; given {request.request_id!r}; choose another", param="rid")
            refusal = self.handle.engine.refusal(request)
            if refusal is not None:
                raise ApiError(refusal)
        generation = Generation(self, requests, is_counted=is_counted)
        try:
            for request in requests:
                self.handle.submit(request)
                self._open[request.request_id] = generation
        except ServerError as error:
            generation.close()
            raise EngineUnavailable(error.reason, code="engine_failed") from error
        return generation

    def abort(self, rid: str | None) -> list[str]:
        """Abort the requests of one call (`rid`, or `rid-0`, `rid-1`, … of a list of prompts), or all; return their ids."""
        found = [request_id for request_id in self._open if rid is None or is_part_of(request_id, rid)]
        for request_id in found:
            self._abort(request_id)
        return found

    def stats(self) -> Any:
        """Return the engine's newest stats, None before it runs."""
        return None if self.handle is None else self.handle.stats()

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that the engine still holds."""
        return tuple(self._open)

    async def stop(self, timeout_s: float) -> bool:
        """End all requests with an error and close the engine; True where that was done in time."""
        self.failure = self.failure if self.handle is not None and self.failure else STOPPING
        self._end_all(EngineUnavailable(STOPPING, code="stopping"))
        self._executor.shutdown(wait=False)
        if self.handle is None:
            return not self._has_begun
        closing = asyncio.get_running_loop().create_future()
        loop, closer = asyncio.get_running_loop(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="close")
        closer.submit(self.handle.close).add_done_callback(lambda done: loop.call_soon_threadsafe(closing.set_result, None))
        closer.shutdown(wait=False)
        try:
            await asyncio.wait_for(asyncio.shield(closing), timeout_s)
        except TimeoutError:
            return False
        return True

    def _abort(self, request_id: str) -> None:
        if self.handle is not None and request_id in self._open:
            self.handle.abort(request_id)

    def _deliver(self, updates: Sequence[GenerationUpdate]) -> None:
        for update in updates:
            generation = self._open.get(update.request_id)
            if generation is None:
                continue
            if update.finish_reason is not None:
                del self._open[update.request_id]
            if generation.is_counted:
                self._observe(update)
            generation.put(update)

    def _fail(self, reason: str) -> None:
        self.failure = f"the engine failed: {reason}"
        log.error("%s", self.failure)
        self._end_all(EngineUnavailable(self.failure, code="engine_failed"))

    def _end_all(self, error: ApiError) -> None:
        for generation in set(self._open.values()):
            generation.put(error)
        self._open.clear()


def is_part_of(request_id: str, rid: str) -> bool:
    """True for the id of a call itself or of one of its prompts."""
    return request_id == rid or (request_id.startswith(f"{rid}-") and request_id[len(rid) + 1 :].isdigit())


class Generation:
    """The requests of one caller and what comes of them, in the order in which it came."""

    def __init__(self, bridge: EngineBridge, requests: Sequence[GenerationRequest], *, is_counted: bool) -> None:
        self.is_counted = is_counted
        self._bridge = bridge
        self._running = {request.request_id for request in requests}
        self._queue: asyncio.Queue[GenerationUpdate | ApiError] = asyncio.Queue()
        self._is_closed = False

    async def updates(self) -> AsyncIterator[GenerationUpdate]:
        """Yield updates until every request has finished.

        Raises:
            ApiError: a request failed, the engine failed, or the server stops.
        """
        while self._running:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            if item.finish_reason == "error":
                raise ApiError(f"the generation failed: {item.error}", status=500, code="generation_failed")
            if item.finish_reason is not None:
                self._running.discard(item.request_id)
            yield item

    def put(self, item: GenerationUpdate | ApiError) -> None:
        """Add what `updates` yields or raises next."""
        if not self._is_closed:
            self._queue.put_nowait(item)

    def close(self) -> None:
        """Abort what has not finished; nobody reads on."""
        self._is_closed = True
        for request_id in self._running:
            self._bridge._abort(request_id)
