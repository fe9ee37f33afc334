"""Executors: where a trial runs. The driver submits jobs and polls for records; it alone writes the study."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from ddtree_bench.backends import Backend
from ddtree_bench.errors import DdtreeError, MissingPackageError, unknown_name
from ddtree_bench.records import TrialRecord
from ddtree_bench.trial import TrialJob, run_trial
from ddtree_bench.trial.run import OnStage


class Executor(Protocol):
    """Runs trial jobs in `num_slots` places."""

    num_slots: int

    def submit(self, job: TrialJob) -> None:
        """Take a job; it may start now or at the next poll."""
        ...

    def poll(self) -> list[tuple[TrialJob, TrialRecord]]:
        """Wait until at least one submitted job has ended; return those that have."""
        ...

    def cancel(self) -> None:
        """End every job that runs and forget those that wait; nothing of a server is left."""
        ...


class LocalExecutor:
    """Runs one job at a time in this process: two trials on one machine would measure each other."""

    num_slots = 1

    def __init__(self, backend: Backend, on_stage: OnStage) -> None:
        self._backend = backend
        self._on_stage = on_stage
        self._waiting: list[TrialJob] = []

    def submit(self, job: TrialJob) -> None:
        """Queue a job for the next poll."""
        self._waiting.append(job)

    def poll(self) -> list[tuple[TrialJob, TrialRecord]]:
        """Run the first waiting job to its end."""
        if not self._waiting:
            return []
        job = self._waiting.pop(0)
        return [(job, run_trial(job, self._backend, on_stage=self._on_stage))]

    def cancel(self) -> None:
        """Forget the waiting jobs; a running one was ended by the exception that led here."""
        self._waiting.clear()


def get_executor(name: str, backend: Backend, on_stage: OnStage) -> Executor:
    """Return the executor of a name: local, ray, or ray://HOST:PORT.

    Raises:
        ValueError: unknown name.
        MissingPackageError: Ray is not installed.
        DdtreeError: Ray, which this version does not drive yet.
    """
    if name == "local":
        return LocalExecutor(backend, on_stage)
    if name == "ray" or name.startswith("ray://"):
        if importlib.util.find_spec("ray") is None:
            raise MissingPackageError("ray", "ray", f"--executor {name}")
        raise DdtreeError(f"--executor must be local in this version; given {name!r}: Ray comes with a later one")
    raise unknown_name("--executor", name, ("local", "ray", "ray://HOST:PORT"))
