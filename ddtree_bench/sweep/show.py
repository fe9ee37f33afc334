"""Shows a sweep's progress on standard error: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from ddtree_bench.records import TrialRecord
from ddtree_bench.sweep.run import Observer
from ddtree_bench.trial import TrialJob


@contextlib.contextmanager
def make_observer() -> Iterator[Observer]:
    """Return the observer that fits standard error."""
    if not sys.stderr.isatty():
        yield PlainObserver()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[eta]}"), console=Console(stderr=True)) as progress:
        yield RichObserver(progress)


class PlainObserver(Observer):
    """One line for each thing that happened, with the time that is left."""

    def __init__(self) -> None:
        self._num_done = self._num_trials = self._num_here = 0
        self._started_s = time.monotonic()
        self._job: TrialJob | None = None

    def begin(self, num_done: int, num_trials: int) -> None:
        """Remember where the search stands."""
        self._num_done, self._num_trials = num_done, num_trials
        self._started_s = time.monotonic()
        if num_done:
            self.note(f"continues: {num_done} of {num_trials} trials are done")

    def launch(self, job: TrialJob) -> None:
        """Say what starts."""
        self._job = job
        self._say(f"{self._where(job)} {job.setting.label()}: launch")

    def ended(self, job: TrialJob, record: TrialRecord, num_done: int) -> None:
        """Say what came out, and how long the rest may take."""
        if job.number >= 0:
            self._num_here += 1
            self._num_done = num_done
        self._say(f"{self._where(job)} {outcome(record)}{self.eta()}")

    def note(self, text: str) -> None:
        """Say it."""
        self._say(text)

    def eta(self) -> str:
        """Return the time that is left, from the trials of this run; empty before there is one."""
        left = self._num_trials - self._num_done
        if not self._num_here or left <= 0:
            return ""
        return f"  ({(time.monotonic() - self._started_s) / self._num_here * left / 60:.1f} min left)"

    def _where(self, job: TrialJob) -> str:
        if job.number < 0:
            return "[plain]"
        attempt = f", attempt {job.attempt}" if job.attempt > 1 else ""
        return f"[{job.number + 1}/{self._num_trials}] trial {job.number}{attempt}"

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class RichObserver(PlainObserver):
    """The same, above a live line with the stage of the running trial."""

    def __init__(self, progress: Any) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("plain arm", total=None, eta="")

    def begin(self, num_done: int, num_trials: int) -> None:
        """Show how far the search is."""
        super().begin(num_done, num_trials)
        self._progress.update(self._task, total=num_trials, completed=num_done)

    def stage(self, text: str) -> None:
        """Show the stage of the running trial."""
        if self._job is not None:
            self._progress.update(self._task, description=f"{self._where(self._job)} {self._job.setting.label()}: {text}")

    def ended(self, job: TrialJob, record: TrialRecord, num_done: int) -> None:
        """Show what came out."""
        super().ended(job, record, num_done)
        self._progress.update(self._task, completed=num_done, eta=self.eta())

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


def outcome(record: TrialRecord) -> str:
    """Return a trial's outcome in one line."""
    if record.failure is not None:
        fault = "the setting's own fault" if record.failure.is_own_fault else "the machine's fault"
        return f"{record.label}: failed, {record.failure.kind} ({fault}): {record.failure.reason}"
    rate, acceptance = record.metrics.get("output_tok_s"), record.metrics.get("acceptance_length")
    told = "" if acceptance is None else f", acceptance length {acceptance:.2f}"
    unchecked = [gate.name for gate in record.gates if gate.passed is None]
    told += f" (not checked: {', '.join(unchecked)})" if unchecked else ""
    return f"{record.label}: {rate:.1f} tok/s{told}"
