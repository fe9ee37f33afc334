"""Rank 0's side of a running engine: one thread that steps it, and a border that other threads may call.

Owns the queue of requests, the other ranks' processes, and what happens when something dies: every open request gets
an update with finish_reason "error", and whoever waits is told why. HTTP is left to the server.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddtree_bench.engine.engine import Engine
from ddtree_bench.engine.ranks import WORKER_COMMAND, RankProcesses, StepCommand, rank_died
from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.engine.stats import EngineStats
from ddtree_bench.engine.worker import MakeEngine, apply_command
from ddtree_bench.errors import DdtreeError, ServerError

OnUpdates = Callable[[Sequence[GenerationUpdate]], None]
_WATCH_INTERVAL_S = 0.2
# How long rank 0's own error may take to arrive after another rank has died; it usually says more.
_OWN_ERROR_GRACE_S = 1.0
_STOP_TIMEOUT_S = 10.0


class EngineHandle:
    """A running engine; made by `launch`. All methods may be called from any thread.

    Args:
        settings: how to run.
        on_updates: called on the engine's thread with the updates of each step; must return quickly and not raise.
        on_failure: called once, from any thread, when the engine can no longer run.
    """

    def __init__(
        self,
        settings: EngineSettings,
        on_updates: OnUpdates,
        on_failure: Callable[[ServerError], None] | None,
        worker_command: Sequence[str],
        make_engine: MakeEngine,
    ) -> None:
        self.settings = settings
        self.error: ServerError | None = None
        self._cause: BaseException | None = None
        self._on_updates, self._on_failure = on_updates, on_failure
        self._worker_command, self._make_engine = worker_command, make_engine
        self._lock = threading.Condition()
        self._submitted: list[GenerationRequest] = []
        self._aborted: list[str] = []
        self._open: dict[str, GenerationUpdate] = {}
        self._is_closing = False
        self._settled = threading.Event()
        self._has_started = False
        self._ranks: RankProcesses | None = None
        self._engine: Engine | None = None
        self._stats: EngineStats | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)

    @property
    def engine(self) -> Engine:
        """Rank 0's engine, for what does not change: tokenizer, vocab_size, max_context, eos_token_ids, refusal()."""
        assert self._engine is not None, "launch returns once the engine exists"
        return self._engine

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its updates come through on_updates.

        Raises:
            ServerError: the engine has failed or is closing.
            ValueError: a request of this id has not finished yet.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._is_closing:
                raise ServerError("the engine must be running to take a request; it is closing", kind="closing")
            if request.request_id in self._open:
                raise ValueError(f"request_id must be new; {request.request_id!r} is still running; give each its own")
            self._open[request.request_id] = _empty_update(request)
            self._submitted.append(request)
            self._lock.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request soon; its last update says "abort". Finished and unknown ones are left alone."""
        with self._lock:
            if request_id in self._open:
                self._aborted.append(request_id)
                self._lock.notify_all()

    def stats(self) -> EngineStats:
        """Return the counters after the last step."""
        assert self._stats is not None, "launch returns once the engine exists"
        return self._stats

    def close(self) -> None:
        """End all requests with "abort", stop every rank and free the group; safe to call twice."""
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
        # A thread that hangs in a collective of a dead rank never ends; it is a daemon and dies with the process.
        self._thread.join(_STOP_TIMEOUT_S)
        if self._ranks is not None:
            self._ranks.kill()

    def start(self) -> None:
        """Start everything and return when the engine can take requests.

        Raises:
            ValueError: the settings do not fit the checkpoints or the machine.
            ServerError: a rank died.
        """
        self._thread.start()
        self._settled.wait()
        if self.error is not None:
            if self._cause is not None:  # its own error: it is about to leave the group, which the end of the process would break
                self._thread.join(_STOP_TIMEOUT_S)
            raise self._cause if isinstance(self._cause, ValueError) else self.error

    def _main(self) -> None:
        try:
            self._run()
        except (DdtreeError, ValueError) as error:
            self._end_of_thread(error)
            # Before the start a ValueError is an answer to the caller of `launch`; later it is a crash with a traceback.
            if self._has_started and isinstance(error, ValueError):
                raise
        finally:
            self._end_of_thread(sys.exception())

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads_per_rank)
        # Started here because the kernel ends the ranks when the thread that started them ends.
        self._ranks = RankProcesses(self.settings, self._worker_command)
        self._watcher.start()
        self._engine = self._make_engine(self.settings, self._ranks.join())
        self._stats = self._engine.stats()
        self._has_started = True
        self._settled.set()
        while (command := self._next_command()) is not None:
            self._ranks.send(command)
            apply_command(self._engine, command)
            updates = self._engine.step()
            self._stats = self._engine.stats()
            self._deliver(updates)
        if self.error is not None:
            return
        self._ranks.send(StepCommand(stop=True))
        if self.settings.tensor_parallel > 1:
            dist.destroy_process_group()
        self._ranks.wait(_STOP_TIMEOUT_S)

    def _next_command(self) -> StepCommand | None:
        """Wait until there is something to do; None when closing or failed."""
        engine = self._engine
        assert engine is not None, "the engine is made before its first command"
        with self._lock:
            while not (self._submitted or self._aborted or self._has_ended() or engine.has_work):
                self._lock.wait()
            if self._has_ended():
                return None
            command = StepCommand(submitted=tuple(self._submitted), aborted=tuple(self._aborted))
            self._submitted.clear()
            self._aborted.clear()
            return command

    def _has_ended(self) -> bool:
        return self._is_closing or self.error is not None

    def _deliver(self, updates: Sequence[GenerationUpdate]) -> None:
        with self._lock:
            updates = [update for update in updates if update.request_id in self._open]
            for update in updates:
                self._open[update.request_id] = update
                if update.finish_reason is not None:
                    del self._open[update.request_id]
        if updates:
            self._on_updates(updates)

    def _watch(self) -> None:
        """Notice a rank that dies while rank 0 is idle, or hangs because of it."""
        ranks = self._ranks
        assert ranks is not None, "the watcher starts after the ranks"
        while self._thread.is_alive() and not self._is_closing:
            dead = ranks.find_dead()
            if dead is not None:
                self._thread.join(_OWN_ERROR_GRACE_S)
                self._fail(rank_died(dead), None)
                return
            time.sleep(_WATCH_INTERVAL_S)

    def _end_of_thread(self, cause: BaseException | None) -> None:
        if cause is None:
            self._finish_open("abort", None)
            return
        self._fail(self._explain(cause), cause)
        if self.settings.device == "cpu" and dist.is_initialized():
            dist.destroy_process_group()

    def _explain(self, cause: BaseException) -> ServerError:
        if isinstance(cause, ServerError):
            return cause
        is_own = self._ranks is None or isinstance(cause, DdtreeError | ValueError)
        dead = None if is_own else self._find_dead_soon()
        return rank_died(dead) if dead else ServerError(f"the engine stopped: {type(cause).__name__}: {cause}", kind="engine")

    def _find_dead_soon(self) -> str | None:
        """A rank's sockets close a moment before its process can be seen to have ended."""
        assert self._ranks is not None, "called once the ranks exist"
        deadline = time.monotonic() + _OWN_ERROR_GRACE_S
        while (dead := self._ranks.find_dead()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return dead

    def _fail(self, error: ServerError, cause: BaseException | None) -> None:
        """End everything because of an error; only the first one counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error, self._cause = error, cause
            self._lock.notify_all()
        if self._ranks is not None:
            self._ranks.kill()
        self._finish_open("error", error.reason)
        self._settled.set()
        if self._on_failure is not None:
            self._on_failure(error)

    def _finish_open(self, reason: str, message: str | None) -> None:
        with self._lock:
            last, self._open = list(self._open.values()), {}
        if last:
            self._on_updates([_ended(update, reason, message) for update in last])


def launch(
    settings: EngineSettings,
    on_updates: OnUpdates,
    *,
    on_failure: Callable[[ServerError], None] | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
    make_engine: MakeEngine = Engine,
) -> EngineHandle:
    """Start an engine with all its ranks and return when it can take requests.

    Args:
        settings: how to run; `thread_environment(settings)` should be in the environment before torch is imported.
        on_updates: called on the engine's thread with each step's updates.
        on_failure: called once if the engine can no longer run; open requests have had their last update by then.
        worker_command, make_engine: how a rank and an engine are made; other values are for tests.

    Raises:
        ValueError: the settings do not fit the checkpoints or the machine.
        ServerError: a rank died while starting.
    """
    handle = EngineHandle(settings, on_updates, on_failure, worker_command, make_engine)
    handle.start()
    return handle


def _empty_update(request: GenerationRequest) -> GenerationUpdate:
    return GenerationUpdate(
        request_id=request.request_id,
        token_ids=(),
        text="",
        num_prompt_tokens=len(request.prompt_tokens),
        num_output_tokens=0,
    )


def _ended(update: GenerationUpdate, reason: str, message: str | None) -> GenerationUpdate:
    """Return the last update of a request that the engine can no longer finish itself."""
    return GenerationUpdate(
        request_id=update.request_id,
        token_ids=(),
        text="",
        num_prompt_tokens=update.num_prompt_tokens,
        num_output_tokens=update.num_output_tokens,
        finish_reason=reason,
        error=message,
        spec=update.spec,
    )
