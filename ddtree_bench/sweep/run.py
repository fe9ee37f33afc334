"""The driver of a sweep: lock, resume, plain arm, then ask → launch → tell until the number of trials is reached.

Plain decoding is measured again every few trials and at the end, so that its drift is known (`ddtree_bench.sweep.baselines`).

trial.json is written before anything is told, so a kill at any instant loses no completed trial; the same command again goes
on to the same total. `trial-NNN` holds settled trials only: a launch that the machine spoiled is moved to failed-attempts/.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddtree_bench.backends import Backend, get_backend, refuse_ignored_knobs
from ddtree_bench.backends.leases import default_lease_dir, sweep_leases
from ddtree_bench.config import KnobRange, SweepSpec, TreeSetting
from ddtree_bench.errors import ServerError, unknown_name
from ddtree_bench.metrics.latency import samples_needed
from ddtree_bench.records import TrialRecord, provenance, read_baseline, read_trials
from ddtree_bench.sweep.baselines import baseline_asked, baseline_dir, is_due, last_measured, read_baselines
from ddtree_bench.sweep.journal import open_storage
from ddtree_bench.sweep.launchers import Executor, get_executor
from ddtree_bench.sweep.lock import results_lock
from ddtree_bench.sweep.objective import Reference
from ddtree_bench.sweep.results import SweepResult, check_same_study, collect, trial_dir, write_results
from ddtree_bench.sweep.space import MODE, Space
from ddtree_bench.sweep.study import MAX_ATTEMPTS, Asked, Study
from ddtree_bench.trial import Interrupted, TrialJob, interruptible
from ddtree_bench.trial.plain import gate_prompts, plain_key, read_plain

LATENCIES = tuple(f"{word}_{part}_ms" for word in ("ttft", "tpot", "itl", "e2e") for part in ("mean", "p50", "p90", "p99"))
CONSTRAINTS = (*LATENCIES, "ms_per_token")


class Observer:
    """Is told what a sweep does; does nothing with it. The command line draws from it."""

    def begin(self, num_done: int, num_trials: int) -> None:
        """The search begins or goes on."""

    def stage(self, text: str) -> None:
        """The running trial has come to a stage."""

    def launch(self, job: TrialJob) -> None:
        """A trial is about to start."""

    def ended(self, job: TrialJob, record: TrialRecord, num_done: int) -> None:
        """A trial has ended."""

    def note(self, text: str) -> None:
        """Something that a person should know."""


def resolve(spec: SweepSpec) -> tuple[SweepSpec, Space]:
    """Return the spec with every knob of its space written out, and the space.

    Raises:
        ValueError: a spec that no sweep can run.
    """
    space = Space.of(spec)
    if spec.study.replicates != 1:
        raise ValueError(f"study.replicates must be 1 in this version; given {spec.study.replicates}")
    for name, limit in spec.constraints.items():
        _check_constraint(name, limit, spec.load.num_prompts)
    knobs = tuple(KnobRange(name=knob.name, values=knob.values) for knob in space.knobs.values() if knob.name != MODE)
    return replace(spec, space=knobs), space


def _check_constraint(name: str, limit: float, num_prompts: int) -> None:
    if name not in CONSTRAINTS:
        raise unknown_name("key of [constraints]", name, CONSTRAINTS)
    if not limit > 0:
        raise ValueError(f"constraints.{name} must be greater than 0 (an upper limit); given {limit!r}")
    percent = next((int(part[1:]) for part in name.split("_") if part in ("p50", "p90", "p99")), None)
    needed = 1 if percent is None else samples_needed(percent)
    if num_prompts < needed:
        raise ValueError(f"load.num_prompts must be at least {needed} so that constraints.{name} is known; given {num_prompts}")


def check_backend(spec: SweepSpec, space: Space, backend: Backend, *, reuse_server: bool = False) -> None:
    """Return if the backend can run every setting of the space.

    Raises:
        ValueError: it cannot launch, cannot change trees while it runs, or would ignore a knob.
    """
    if not backend.can_launch:
        raise ValueError(
            f"server.backend must be one that launches servers for a sweep; given {backend.name!r}: measure a server that "
            "someone else runs with `ddtree-bench load` or `compare`"
        )
    if reuse_server and not backend.can_change_tree:
        raise ValueError(
            f"--reuse-server needs a backend that changes the tree of a running server; given {backend.name!r}; leave it out, "
            "and each trial launches its own server"
        )
    searched = {name for name in space.ranges() if name != MODE}
    for mode in space.knobs[MODE].values:
        counted = searched if mode == spec.server.mode else searched & {"block_size", "depth"}
        refuse_ignored_knobs(backend, mode, counted)


def run_sweep(
    spec: SweepSpec,
    results_dir: Path,
    *,
    backend: Backend | None = None,
    executor: str = "local",
    observer: Observer | None = None,
    reuse_server: bool = False,
    lease_dir: Path | None = None,
) -> SweepResult:
    """Run or continue a sweep in a results folder and return what it found.

    Raises:
        Interrupted: SIGINT or SIGTERM; the server is stopped, and the same call goes on.
        DdtreeError: another sweep writes the folder, it holds another study, or plain decoding cannot be measured.
        ValueError: a spec that cannot run.
    """
    observer = observer or Observer()
    backend = backend or get_backend(spec.server.backend)
    spec, space = resolve(spec)
    check_backend(spec, space, backend, reuse_server=reuse_server)
    places = get_executor(executor, backend, observer.stage)
    with results_lock(results_dir), interruptible():
        made = provenance()
        check_same_study(spec, results_dir, made)
        for line in sweep_leases(lease_dir or default_lease_dir()):
            observer.note(line)
        driver = _Driver(spec, space, results_dir, backend, places, observer, made)
        try:
            return driver.run()
        except Interrupted:
            places.cancel()
            write_results(spec, collect(spec, results_dir, backend))
            raise


class _Driver:
    """One run of a sweep in a locked results folder."""

    def __init__(
        self,
        spec: SweepSpec,
        space: Space,
        results_dir: Path,
        backend: Backend,
        executor: Executor,
        observer: Observer,
        made: Mapping[str, Any],
    ) -> None:
        self._spec, self._space, self._results_dir = spec, space, results_dir
        self._backend, self._executor, self._observer = backend, executor, observer
        self._provenance = made
        self._plain_tried = 0  # after how many trials plain decoding was last launched, whatever came of it
        self._started_s = time.monotonic()

    def run(self) -> SweepResult:
        baseline = self._baseline()
        study = Study(
            self._spec.study,
            self._space,
            open_storage(self._results_dir, self._spec.study.storage),
            Reference(output_tok_s=float(baseline.metrics["output_tok_s"])),
            tuple(self._spec.constraints),
        )
        settled = self._settled()
        for line in study.reconcile(list(settled.values())):
            self._observer.note(line)
        self._observer.begin(len(settled), self._spec.study.trials)
        is_exhausted = self._search(study, settled)
        self._measure_plain_again(len(settled), is_over=True)
        result = collect(self._spec, self._results_dir, self._backend, num_repeats=study.num_repeats, is_exhausted=is_exhausted)
        write_results(self._spec, result)
        if result.plain is not None and self._spec.gates.drift is not None:
            self._observer.note(result.drift.text)
        return result

    def _settled(self) -> dict[int, TrialRecord]:
        """Return the settled trials of the folder; one that awaits another attempt is put aside."""
        settled = {}
        for record in read_trials(self._results_dir):
            is_spoiled = record.failure is not None and not record.failure.is_own_fault
            if is_spoiled and record.attempt < MAX_ATTEMPTS:
                self._put_aside(trial_dir(self._results_dir, record.number), record.attempt)
            else:
                settled[record.number] = record
        return settled

    def _baseline(self) -> TrialRecord:
        """Return the first launch of the plain arm, measured now unless the folder holds it.

        Raises:
            DdtreeError: plain decoding has failed: without it nothing can be gated or compared.
        """
        kept = read_baseline(self._results_dir)
        if kept is not None and kept.state == "complete" and self._has_plain_outputs():
            return kept
        record = self._measure_plain(1, 0)
        failure = record.failure
        if failure is None:
            return record
        reason = f"plain decoding must be measured before a sweep; it failed: {failure.reason}"
        raise ServerError(reason, kind=failure.kind, log_tail=failure.log_tail)

    def _measure_plain(self, index: int, num_trials: int) -> TrialRecord:
        """Launch the plain arm for the `index`-th time, after `num_trials` trials, and again where the machine spoils it."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            job = self._job(-index, TreeSetting(mode="plain"), baseline_asked(num_trials), attempt)
            record = self._run_one(job)
            self._observer.ended(job, record, num_trials)
            if record.failure is None or record.failure.is_own_fault:
                break
            self._put_aside(job.workdir, attempt)
        return record

    def _measure_plain_again(self, num_trials: int, *, is_over: bool) -> None:
        """Measure plain decoding once more where that is due; a launch that fails leaves the drift unknown and ends nothing."""
        if self._spec.gates.drift is None:
            return
        baselines = read_baselines(self._results_dir)
        if not is_due(max(last_measured(baselines), self._plain_tried), num_trials, is_over=is_over):
            return
        self._plain_tried = num_trials
        failure = self._measure_plain(max(baselines) + 1, num_trials).failure
        if failure is not None:
            self._observer.note(f"plain decoding could not be measured again after {num_trials} trials: {failure.reason}")

    def _has_plain_outputs(self) -> bool:
        """True where the losslessness gate has what it needs; a data set's file may have changed since."""
        if not self._spec.gates.losslessness:
            return True
        return read_plain(self._plain_path, plain_key(self._spec, gate_prompts(self._spec))) is not None

    @property
    def _plain_path(self) -> Path:
        return self._results_dir / "plain.json"

    def _job(self, number: int, setting: TreeSetting, asked: Any, attempt: int) -> TrialJob:
        folder = self._results_dir
        workdir = baseline_dir(folder, -number) if number < 0 else trial_dir(folder, number)
        shutil.rmtree(workdir, ignore_errors=True)  # what a killed run left: it has no record
        return TrialJob(
            number=number,
            spec=self._spec,
            setting=setting,
            asked=asked,
            workdir=workdir,
            plain_path=self._plain_path,
            attempt=attempt,
            provenance=self._provenance,
        )

    def _run_one(self, job: TrialJob) -> TrialRecord:
        self._observer.launch(job)
        self._executor.submit(job)
        [(_, record)] = self._executor.poll()
        if record.stop.get("is_clean") is False:
            self._observer.note(f"{record.label}: after the stop: {record.stop.get('detail')}")
        return record

    def _search(self, study: Study, settled: dict[int, TrialRecord]) -> bool:
        """Run trials until the total is reached; return whether the space was exhausted before."""
        while len(settled) < self._spec.study.trials:
            if self._is_over_time():
                self._observer.note(f"study.timeout_s of {self._spec.study.timeout_s:g} s is over; the same command goes on")
                return False
            self._measure_plain_again(len(settled), is_over=False)
            number = next(n for n in range(len(settled) + 1) if n not in settled)
            asked = study.ask(number)
            if asked is None:
                self._observer.note(f"every one of the {study.num_legal} settings of the space is measured")
                return True
            record = self._trial(study, asked, number)
            if record is not None:
                settled[number] = record
        return study.is_exhausted()

    def _trial(self, study: Study, asked: Asked, number: int) -> TrialRecord | None:
        """Launch one setting and tell it; return its record once it is settled."""
        job = self._job(number, asked.setting, asked.values, attempt=study.attempts(number) + 1)
        try:
            record = self._run_one(job)
        except Interrupted:
            study.tell_interrupted(asked)
            raise
        is_settled = study.tell(asked, record)
        if not is_settled:
            self._put_aside(job.workdir, job.attempt)
        num_done = len(read_trials(self._results_dir))
        self._observer.ended(job, record, num_done)
        write_results(self._spec, collect(self._spec, self._results_dir, self._backend))
        return record if is_settled else None

    def _put_aside(self, workdir: Path, attempt: int) -> None:
        """Move a launch that the machine spoiled out of the way; the trial comes again under its number."""
        target = self._results_dir / "failed-attempts" / f"{workdir.name}-attempt-{attempt}"
        target.parent.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        workdir.rename(target)

    def _is_over_time(self) -> bool:
        limit = self._spec.study.timeout_s
        return limit is not None and time.monotonic() - self._started_s > limit
