"""Runs one load: model's name, warm-up, counters, the measured window, counters again.

Records reach the disk as requests end, so that a kill or Ctrl-C loses none. What the numbers mean is `metrics`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from ddtree_bench.config import LoadSpec
from ddtree_bench.load.arrivals import Schedule, schedule_of
from ddtree_bench.load.client import Client, first_model, make_session, server_root
from ddtree_bench.load.health import ClientHealth
from ddtree_bench.load.server_metrics import Counters, difference, scrape
from ddtree_bench.load.workloads import Prompt, Workload, workload_of
from ddtree_bench.records import RequestLog, RequestRecord

OnRecord = Callable[[RequestRecord], None]


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What one load gave. Records are in the order of sending; times are seconds on the client's monotonic clock.

    The window begins when the first measured request is due and ends with the last byte of the last one. `counters` is the
    difference of the server's counters over it. `client` holds the client's own health.
    """

    records: Sequence[RequestRecord]
    window_start_s: float
    window_end_s: float
    counters_before: Counters = field(default_factory=lambda: Counters(reason="not read"))
    counters_after: Counters = field(default_factory=lambda: Counters(reason="not read"))
    client: Mapping[str, Any] = field(default_factory=dict)
    dataset: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    num_failed_warmups: int = 0
    notes: Sequence[str] = ()
    is_interrupted: bool = False

    @property
    def window(self) -> tuple[float, float]:
        """The measured window as (start, end) in seconds."""
        return (self.window_start_s, self.window_end_s)

    @property
    def counters(self) -> Counters:
        """The server's counters over the window, or the reason why there are none."""
        return difference(self.counters_before, self.counters_after)


class LoadInterruptedError(KeyboardInterrupt):
    """A signal ended a load; `result` holds what had ended, the requests in flight recorded as cancelled."""

    def __init__(self, result: LoadResult, number: int = signal.SIGINT) -> None:
        super().__init__("the load was interrupted")
        self.result = result
        self.exit_status = 128 + number  # what a shell expects


def run_load(base_url: str, spec: LoadSpec, **options: Any) -> LoadResult:
    """Run a load to its end and return what it gave; takes the options of `run_load_async`.

    Raises:
        LoadInterruptedError: SIGINT or SIGTERM; carries what is there. SystemExit: SIGTERM before there is anything.
        ValueError: a bad URL, data set or row.
    """
    with _sigterm_as_ctrl_c() as was_terminated:
        try:
            result = asyncio.run(run_load_async(base_url, spec, **options))
        except KeyboardInterrupt:
            if was_terminated:
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
    if result.is_interrupted:
        raise LoadInterruptedError(result, signal.SIGTERM if was_terminated else signal.SIGINT)
    return result


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[list[bool]]:
    """Let SIGTERM do what Ctrl-C does inside the block, and note that it came; only the main thread can."""
    was_terminated: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield was_terminated
        return

    def pass_on(*_: object) -> None:
        was_terminated.append(True)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
            raise SystemExit(128 + signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield was_terminated
    finally:
        signal.signal(signal.SIGTERM, before)


async def run_load_async(
    base_url: str,
    spec: LoadSpec,
    *,
    model: str | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    prompts: Sequence[Prompt] | None = None,
    log_path: Path | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_record: OnRecord | None = None,
) -> LoadResult:
    """Run a load to its end; with 0 warm-ups exactly `num_prompts` generation requests are sent.

    Args:
        base_url: the server's root, with or without `/v1`.
        spec: prompts, arrivals and sampling.
        model: name to send; None takes the server's first where the endpoint needs one.
        api_key, headers, extra_body: sent with every request; keys of `extra_body` win over the spec's.
        prompts: exactly these, in this order, instead of the spec's data set and num_prompts.
        log_path: a requests.jsonl to append to.
        on_start: called once everything is checked, before the log is opened and anything is sent.
        on_record: called with each measured record as it ends.
    """
    root = server_root(base_url)
    workload = workload_of(spec) if prompts is None else _given_workload(prompts, spec)
    for prompt in workload.prompts:
        if spec.endpoint != "chat":
            prompt.as_text()  # refuse a conversation before anything is sent
    schedule = schedule_of(replace(spec, num_prompts=len(workload.prompts)))
    on_start()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(RequestLog(log_path)) if log_path is not None else None
        async with make_session(api_key, headers) as session:
            name, notes = await _resolve_model(session, root, spec.endpoint, model)
            client = Client(session=session, root=root, spec=spec, model=name, extra_body=extra_body or {})
            warmup = _Run(client, workload.warmups, prefix="warmup")
            run = _Run(client, workload.prompts, log=log, on_record=on_record)
            with _stopped_by_ctrl_c(warmup, run):
                await warmup.go(_warmup_schedule(schedule, len(workload.warmups)))
                unread = Counters(reason="the load was interrupted in its warm-up") if run.is_stopped else None
                before = unread or await scrape(session, root)
                async with ClientHealth() as health:
                    start_s, end_s = await run.go(schedule)
            after = unread or await scrape(session, root)
    return LoadResult(
        records=run.records,
        window_start_s=start_s,
        window_end_s=end_s,
        counters_before=before,
        counters_after=after,
        client=health.report(),
        dataset=workload.dataset,
        model=name,
        num_failed_warmups=sum(record.outcome != "ok" for record in warmup.records),
        notes=(*workload.notes, *notes),
        is_interrupted=run.is_stopped,
    )


async def _resolve_model(
    session: aiohttp.ClientSession, root: str, endpoint: str, model: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the model to name in requests and what to tell: as given, else the server's first; /generate needs none.

    A server that lists no model may still answer requests that name none; whether it does is in its replies.
    """
    if model is not None or endpoint == "generate":
        return model, ()
    found = await first_model(session, root)
    if found is not None:
        return found, ()
    return None, (f"{root}/v1/models lists no model, so requests name none; if the server needs a name, give --model NAME",)


def _given_workload(prompts: Sequence[Prompt], spec: LoadSpec) -> Workload:
    if not prompts:
        raise ValueError("prompts must hold at least one prompt; given none")
    warmups = tuple(prompts[i % len(prompts)] for i in range(spec.num_warmups))
    notes = ("the warm-up sends prompts that are measured too",) if warmups else ()
    return Workload(prompts=tuple(prompts), warmups=warmups, dataset={"name": "given", "num_rows": len(prompts)}, notes=notes)


def _warmup_schedule(schedule: Schedule, num_warmups: int) -> Schedule:
    """Warm up as a closed loop at the concurrency that will be measured (an open loop without a cap: all at once)."""
    return Schedule(num_requests=num_warmups, offsets_s=None, max_concurrency=schedule.max_concurrency or max(num_warmups, 1))


class _Run:
    """Sends a list of prompts by a schedule and keeps their records; can be stopped from outside."""

    def __init__(
        self,
        client: Client,
        prompts: Sequence[Prompt],
        *,
        prefix: str = "request",
        log: RequestLog | None = None,
        on_record: OnRecord | None = None,
    ) -> None:
        self._client, self._prompts, self._prefix = client, prompts, prefix
        self._log, self._on_record = log, on_record
        self._records: dict[int, RequestRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_stopped = False

    @property
    def records(self) -> list[RequestRecord]:
        return [self._records[number] for number in sorted(self._records)]

    def stop(self) -> None:
        """End the run: nothing more is sent, requests in flight are recorded as cancelled."""
        self.is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def go(self, schedule: Schedule) -> tuple[float, float]:
        """Send everything; return the window in seconds."""
        start_s = time.monotonic()
        jobs = self._open_loop(start_s, schedule) if schedule.is_open_loop else self._closed_loop(start_s, schedule)
        try:
            await jobs
            await self._settle()
        except asyncio.CancelledError:
            self.stop()
            await self._settle()
            raise
        ends_s = [record.done_s for record in self._records.values() if record.done_s is not None]
        return start_s, max(ends_s, default=time.monotonic())

    async def _settle(self) -> None:
        """Wait for every task; a task that was cancelled before it sent is no failure, anything else is a bug and raised."""
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(job))

    async def _closed_loop(self, start_s: float, schedule: Schedule) -> None:
        numbers = iter(range(schedule.num_requests))
        for _ in range(min(schedule.max_concurrency or 1, schedule.num_requests)):
            if not self.is_stopped:
                self._spawn(self._slot(start_s, numbers))

    async def _slot(self, free_s: float, numbers: Iterator[int]) -> None:
        """Send one request after another; each is due when the one before it ended."""
        for number in numbers:
            record = await self._send(number, free_s)
            if self.is_stopped:
                return
            free_s = record.done_s if record.done_s is not None else time.monotonic()

    async def _open_loop(self, start_s: float, schedule: Schedule) -> None:
        room = asyncio.Semaphore(schedule.max_concurrency) if schedule.max_concurrency else contextlib.nullcontext()
        for number, offset_s in enumerate(schedule.offsets_s or ()):
            due_s = start_s + offset_s
            while (wait_s := due_s - time.monotonic()) > 0 and not self.is_stopped:
                await asyncio.sleep(min(wait_s, 0.2))  # short naps: Ctrl-C is seen between two far-off arrivals
            if self.is_stopped:
                return
            self._spawn(self._send_in(room, number, due_s))

    async def _send_in(self, room: contextlib.AbstractAsyncContextManager[Any], number: int, due_s: float) -> None:
        async with room:
            await self._send(number, due_s)

    async def _send(self, number: int, planned_s: float) -> RequestRecord:
        record = await self._client.send(self._prompts[number], request_id=f"{self._prefix}-{number:05d}", planned_s=planned_s)
        self._records[number] = record
        if self._log is not None:
            self._log.append(record)
        if self._on_record is not None:
            self._on_record(record)
        return record


@contextlib.contextmanager
def _stopped_by_ctrl_c(*runs: _Run) -> Iterator[None]:
    """Let the first Ctrl-C stop the runs in order, and the second one interrupt as usual; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        for run in runs:
            run.stop()

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
