"""One trial: launch → ready → gates → warm → load → window counters → stop = one TrialRecord, written whatever happens."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_bench.backends import Backend, RunningServer
from ddtree_bench.backends.failures import failure_of
from ddtree_bench.backends.launch import log_tail
from ddtree_bench.backends.ready import server_info
from ddtree_bench.config import SweepSpec, TreeSetting
from ddtree_bench.errors import ServerError, TrialError
from ddtree_bench.metrics.summary import summarise_load, trial_metrics
from ddtree_bench.records import Failure, GateResult, RequestRecord, TrialRecord, provenance, write_json
from ddtree_bench.trial import gates
from ddtree_bench.trial.measure import EXIT_WAIT_S, refuse_bad_numbers, run_watched
from ddtree_bench.trial.plain import (
    GatePrompt,
    PlainOutput,
    collect_plain,
    collect_texts,
    gate_concurrency,
    gate_prompts,
    is_noise_keyed,
    plain_key,
    read_plain,
    sampled,
    write_plain,
)

OnStage = Callable[[str], None]
ALL_MET = 0.0
NOT_MET = 1.0


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """What one trial needs; plain data, so that it can be sent to another node.

    `number` is the trial's own number, -1 for the baseline; `plain_path` is the study's plain.json, written by a plain trial
    and read by every other.
    """

    number: int
    spec: SweepSpec
    setting: TreeSetting
    asked: Mapping[str, Any]
    workdir: Path
    plain_path: Path
    attempt: int = 1
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Observed:
    """What a trial has seen so far; kept when a later step fails."""

    gates: list[GateResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timings_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    effective: TreeSetting | None = None
    running: RunningServer | None = None
    stop: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.timings_s[name] = self.timings_s.get(name, 0.0) + time.monotonic() - start_s


def run_trial(job: TrialJob, backend: Backend, *, on_stage: OnStage = lambda stage: None) -> TrialRecord:
    """Run one trial to its end and write its folder: trial.json, requests.jsonl.zst, server.log.

    A server or gate that fails gives a failed record; only an interrupt, a wrong spec or a missing package raise, and the
    server is stopped before they do.
    """
    seen = _Observed()
    failure: Failure | None = None
    job.workdir.mkdir(parents=True, exist_ok=True)
    with seen.timed("total"):
        try:
            _launch_and_measure(job, backend, seen, on_stage)
        except (ServerError, TrialError) as error:
            failure = failure_of(error)
            if not failure.log_tail:
                failure = dataclasses.replace(failure, log_tail=tuple(log_tail(job.workdir / "server.log")))
        compress(job.workdir / "requests.jsonl")
    record = _record(job, backend, seen, failure)
    write_json(job.workdir / "trial.json", record.to_dict())
    return record


def _launch_and_measure(job: TrialJob, backend: Backend, seen: _Observed, on_stage: OnStage) -> None:
    try:
        on_stage("launch")
        with seen.timed("launch"):
            seen.running = backend.start(job.spec.server, job.setting, job.workdir)
        on_stage("gates")
        with seen.timed("gate"):
            _gates_before_load(job, backend, seen)
        on_stage("load")
        _load(job, seen, on_stage)
    finally:
        if seen.running is not None:
            on_stage("stop")
            with seen.timed("stop"):
                report = backend.stop(seen.running)
            seen.stop = {**dataclasses.asdict(report), "is_clean": report.is_clean}
            if not report.is_clean:
                seen.warnings.append(f"after the stop: {report.detail}")


def _gates_before_load(job: TrialJob, backend: Backend, seen: _Observed) -> None:
    running = seen.running
    assert running is not None, "gates run on a server that was started"
    seen.info = server_info(running.url)
    seen.effective = gates.effective_setting(seen.info)
    wanted = job.spec.server.max_running_requests if backend.can_launch else job.spec.load.max_concurrency
    if (warning := gates.capacity_warning(seen.info, wanted)) is not None:
        seen.warnings.append(warning)
    _require(seen, gates.setting_gate(job.setting, seen.effective) if backend.can_launch else None, "setting_mismatch")
    if not job.spec.gates.losslessness:
        return
    try:
        if job.setting.mode == "plain":
            _keep_plain(job, seen, running)
        else:
            _compare_with_plain(job, seen, running, can_launch=backend.can_launch)
    except ServerError:
        running.check(wait_s=EXIT_WAIT_S)  # a server that died says more than the broken connection
        raise


def _keep_plain(job: TrialJob, seen: _Observed, running: RunningServer) -> None:
    """Write plain decoding's own outputs, unless the study holds them; sampled ones only where others can repeat them."""
    prompts, temperature = gate_prompts(job.spec), job.spec.load.temperature
    key = plain_key(job.spec, prompts)
    if read_plain(job.plain_path, key) is not None:
        return
    wanted = prompts + (sampled(prompts, temperature) if temperature > 0 and is_noise_keyed(seen.info) else [])
    outputs = collect_plain(running.url, running.model, wanted, **_limits(job))
    write_plain(job.plain_path, key, outputs, dict(job.provenance) or provenance())


def _compare_with_plain(job: TrialJob, seen: _Observed, running: RunningServer, *, can_launch: bool) -> None:
    """Ask the gate's prompts under the load's own conditions: as many at once, and at its temperature besides greedily.

    Raises:
        TrialError: texts differ, or the study holds no outputs of plain decoding although it could (the machine's fault).
    """
    prompts, temperature, dtype = gate_prompts(job.spec), job.spec.load.temperature, job.spec.server.dtype
    plain = read_plain(job.plain_path, plain_key(job.spec, prompts))
    if plain is None:
        detail = "no outputs of plain decoding are kept for this model and these prompts"
        if can_launch:
            raise TrialError(f"gate losslessness was asked for and must be checked; {detail}", kind="no_plain_outputs")
        seen.gates.append(GateResult(name="losslessness", passed=None, detail=f"not checked: {detail}"))
        return
    concurrency = min(gate_concurrency(job.spec), len(prompts))

    def gate(asked: Sequence[GatePrompt], kept: Sequence[PlainOutput], name: str) -> None:
        texts = collect_texts(running.url, running.model, asked, concurrency=concurrency, **_limits(job))
        _require(seen, gates.losslessness(kept, texts, dtype=dtype, concurrency=concurrency, name=name), "losslessness")

    gate(prompts, [output for output in plain if output.temperature == 0], "losslessness")
    if temperature == 0:
        return
    kept = [output for output in plain if output.temperature > 0]
    why_not = gates.why_not_at_temperature(is_keyed=is_noise_keyed(seen.info), has_plain=bool(kept), dtype=dtype)
    if why_not is not None:
        seen.gates.append(GateResult(name=gates.AT_TEMPERATURE, passed=None, detail=why_not))
        return
    gate(sampled(prompts, temperature), kept, gates.AT_TEMPERATURE)


def _limits(job: TrialJob) -> dict[str, Any]:
    return {"max_tokens": job.spec.gates.gate_max_tokens, "timeout_s": job.spec.load.timeout_s}


def _load(job: TrialJob, seen: _Observed, on_stage: OnStage) -> None:
    running = seen.running
    assert running is not None, "a load runs on a server that was started"
    num_done = 0

    def on_record(_: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        on_stage(f"load {num_done}/{job.spec.load.num_prompts}")

    before: dict[str, float] = {}
    is_known = stage_seconds(seen.info) is not None

    def on_window() -> None:
        before.update(stage_seconds(server_info(running.url)) or {})

    start_s = time.monotonic()
    try:
        result = run_watched(
            running,
            job.spec.load,
            log_path=job.workdir / "requests.jsonl",
            on_record=on_record,
            on_window=on_window if is_known else None,
        )
    except BaseException:
        seen.timings_s["load"] = time.monotonic() - start_s
        raise
    seen.timings_s["warm"] = max(result.window_start_s - start_s, 0.0)
    seen.timings_s["load"] = time.monotonic() - start_s - seen.timings_s["warm"]
    summary = summarise_load(result)
    seen.metrics = trial_metrics(summary) | {"stages_s": _stages_of_window(running, before) if is_known else None}
    seen.warnings += [*result.notes, *summary["warnings"]]
    refuse_bad_numbers(seen.metrics, result)
    acceptance = seen.metrics.get("acceptance_length")
    if job.setting.mode != "plain" and acceptance is not None and acceptance <= 1.0:
        seen.warnings.append("acceptance_length is 1.0: the drafter contributes nothing")
    _require(seen, gates.min_acceptance(seen.metrics, job.spec.gates.min_acceptance, job.setting.mode), "min_acceptance")


def stage_seconds(info: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the seconds by stage that a server's /server_info tells since its start; None where it tells none."""
    block = info.get("ddtree")
    stats = block.get("stats") if isinstance(block, Mapping) else None
    told = stats.get("stage_seconds") if isinstance(stats, Mapping) else None
    if not isinstance(told, Mapping):
        return None
    return {str(name): float(seconds) for name, seconds in told.items() if isinstance(seconds, int | float)}


def _stages_of_window(running: RunningServer, before: Mapping[str, float]) -> dict[str, float] | None:
    """Return the server's seconds by stage inside the measured window; None where it told none after it, or was reset."""
    after = stage_seconds(server_info(running.url))
    if after is None or any(after.get(name, 0.0) < seconds for name, seconds in before.items()):
        return None
    return {name: round(seconds - before.get(name, 0.0), 6) for name, seconds in after.items()}


def _require(seen: _Observed, gate: GateResult | None, kind: str) -> None:
    """Keep a gate's result.

    Raises:
        TrialError: the gate failed.
    """
    if gate is None:
        return
    seen.gates.append(gate)
    if gate.passed is False:
        raise TrialError(f"gate {gate.name} must pass; {gate.detail}", kind=kind)


def _record(job: TrialJob, backend: Backend, seen: _Observed, failure: Failure | None) -> TrialRecord:
    effective = seen.effective or job.setting
    return TrialRecord(
        number=job.number,
        state="complete" if failure is None else "failed",
        asked=dict(job.asked),
        effective=dataclasses.asdict(effective),
        label=job.setting.label(),
        metrics=seen.metrics,
        gates=tuple(seen.gates),
        failure=failure,
        timings_s={name: round(seconds, 3) for name, seconds in seen.timings_s.items()},
        command=_portable(seen.running.command if seen.running is not None else _command(job, backend)),
        server_info=seen.info,
        constraints=constraints_of(job.spec.constraints, seen.metrics if failure is None else None),
        warnings=tuple(seen.warnings),
        stop=seen.stop,
        attempt=job.attempt,
        provenance=dict(job.provenance) or provenance(),
    )


def _command(job: TrialJob, backend: Backend) -> tuple[str, ...]:
    return tuple(backend.command(job.spec.server, job.setting, port=0))


def _portable(command: tuple[str, ...]) -> tuple[str, ...]:
    """Name this interpreter as `python`: where it lies is this machine's business."""
    return tuple("python" if word == sys.executable else word for word in command)


def constraints_of(limits: Mapping[str, float], metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return every constraint of a trial, met where at most 0: value / limit − 1, and launch_ok.

    A failed trial (metrics None) meets none; a metric that is unknown does not meet its limit.
    """
    if metrics is None:
        return {"launch_ok": NOT_MET, **dict.fromkeys(limits, NOT_MET)}
    excess = {name: None if metrics.get(name) is None else metrics[name] / limit - 1.0 for name, limit in limits.items()}
    return {"launch_ok": ALL_MET, **{name: NOT_MET if value is None else value for name, value in excess.items()}}


def compress(path: Path) -> None:
    """Replace a collected requests.jsonl by its .zst; a kill leaves one of the two whole."""
    import zstandard

    if not path.exists():
        return
    packed, scratch = path.with_name(path.name + ".zst"), path.with_name(f".{path.name}.zst")
    scratch.write_bytes(zstandard.ZstdCompressor(level=6).compress(path.read_bytes()))
    scratch.replace(packed)
    path.unlink()
