"""Runs the load of one trial while it watches the server: one that dies ends the load at once, not at a time-out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddtree_bench.backends import RunningServer
from ddtree_bench.backends.failures import kind_of_log
from ddtree_bench.backends.launch import log_tail
from ddtree_bench.config import LoadSpec
from ddtree_bench.errors import ServerError, TrialError
from ddtree_bench.load.runner import LoadResult, run_load_async
from ddtree_bench.load.workloads import workload_of
from ddtree_bench.records import RequestRecord
from ddtree_bench.trial.interrupt import Interrupted

_WATCH_S = 0.2
EXIT_WAIT_S = 2.0  # a dead server breaks connections before its exit is told
MAX_TOK_S_OF_A_STREAM = 50_000.0  # more than any engine decodes for one request: then something else was counted


def run_watched(
    running: RunningServer,
    spec: LoadSpec,
    *,
    log_path: Path,
    on_record: Callable[[RequestRecord], None] | None = None,
    on_window: Callable[[], None] | None = None,
) -> LoadResult:
    """Run the load against a server and return what it gave.

    Args:
        on_window: called between the warm-up and the measured window, while nothing is in flight.
    Raises:
        ServerError: the server's process ended during the load.
        Interrupted: SIGINT or SIGTERM.
    """
    options: dict[str, Any] = {"model": running.model, "log_path": log_path, "on_record": on_record}
    if on_window is None:
        return asyncio.run(_run_watched(running, run_load_async(running.url, spec, **options)))
    return asyncio.run(_run_watched(running, _warm_then_load(running.url, spec, on_window, options)))


async def _warm_then_load(url: str, spec: LoadSpec, on_window: Callable[[], None], options: Mapping[str, Any]) -> LoadResult:
    """Run the warm-up as a load of its own, at the load's concurrency, then the load without one."""
    workload, warm = workload_of(spec), None
    if workload.warmups:
        closed = dataclasses.replace(
            spec,
            num_prompts=len(workload.warmups),
            num_warmups=0,
            request_rate=None,
            max_concurrency=spec.max_concurrency or (1 if spec.request_rate is None else len(workload.warmups)),
        )
        warm = await run_load_async(url, closed, model=options["model"], prompts=workload.warmups)
        if warm.is_interrupted:
            return warm
    on_window()
    result = await run_load_async(url, dataclasses.replace(spec, num_warmups=0), **options)
    return dataclasses.replace(
        result,
        num_failed_warmups=0 if warm is None else sum(record.outcome != "ok" for record in warm.records),
        notes=(*workload.notes, *(note for note in result.notes if note not in workload.notes)),
    )


async def _run_watched(running: RunningServer, loading: Coroutine[Any, Any, LoadResult]) -> LoadResult:
    load = asyncio.create_task(loading)
    watch = asyncio.create_task(_watch(running))
    with _sigterm_cancels(load) as was_terminated:
        try:
            done, _ = await asyncio.wait({load, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch in done:
                watch.result()
            result = await load
        except asyncio.CancelledError:
            if was_terminated:
                raise Interrupted(signal.SIGTERM) from None
            raise
        finally:
            for task in (watch, load):
                task.cancel()
            await asyncio.gather(watch, load, return_exceptions=True)
    if result.is_interrupted:
        raise Interrupted(signal.SIGINT)
    if failed := [record for record in result.records if record.outcome != "ok"]:
        running.check(wait_s=EXIT_WAIT_S)
        _raise_cause_in_log(running, failed[0])
    running.check()
    return result


def _raise_cause_in_log(running: RunningServer, failed: RequestRecord) -> None:
    """Tell why the server failed its requests, where its log knows: a killed rank, memory, the driver, the disk.

    Raises:
        ServerError: of the kind that the log names.
    """
    kind = kind_of_log(log_tail(running.log_path, 200))
    if kind is not None and kind != "unsupported":
        reason = f"every request must succeed; the log says {kind}: {failed.error_message}"
        raise ServerError(reason, kind=kind, log_tail=log_tail(running.log_path))


async def _watch(running: RunningServer) -> None:
    while True:
        running.check()
        await asyncio.sleep(_WATCH_S)


@contextlib.contextmanager
def _sigterm_cancels(task: asyncio.Task[Any]) -> Iterator[list[bool]]:
    was_terminated: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield was_terminated
        return

    def cancel() -> None:
        was_terminated.append(True)
        task.cancel()

    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        yield was_terminated
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def refuse_bad_numbers(metrics: Mapping[str, Any], result: LoadResult) -> None:
    """Return if the numbers of a load may count.

    Raises:
        TrialError: failed requests, no tokens, a number that is none, or a rate that cannot be true.
    """
    failed = [record for record in result.records if record.outcome != "ok"]
    if failed:
        kinds = sorted({str(record.error_kind) for record in failed})
        kind = "timeout" if set(kinds) <= {"timeout", "connect"} else "failed_requests"
        raise TrialError(
            f"every request must succeed; {len(failed)} of {len(result.records)} failed ({', '.join(kinds)}): "
            f"{failed[0].error_message}",
            kind=kind,
        )
    if not metrics.get("output_tokens"):
        raise TrialError(f"a load must give output tokens; given {metrics.get('output_tokens')!r}", kind="no_tokens")
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise TrialError(f"{name} must be a finite number; measured {value}", kind="no_tokens")
    rate, streams = metrics.get("output_tok_s"), max(len(result.records), 1)
    if rate is None:
        raise TrialError("output_tok_s must be known; the server tells no token counts", kind="no_tokens")
    if rate > MAX_TOK_S_OF_A_STREAM * streams:
        raise TrialError(f"output_tok_s must be possible; measured {rate:.0f}", kind="impossible_rate")
