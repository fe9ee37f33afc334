"""What a sweep would do, told without doing it: resolved spec, first settings, launches, time and GPU-hours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddtree_bench.backends import Backend
from ddtree_bench.config import SweepSpec, TreeSetting
from ddtree_bench.records import read_baseline, read_trials
from ddtree_bench.sweep.baselines import last_measured, num_due, read_baselines
from ddtree_bench.sweep.results import difference, holds_study, serving_command
from ddtree_bench.sweep.run import check_backend, resolve
from ddtree_bench.sweep.space import start_params
from ddtree_bench.sweep.toml import to_toml

# assumed where no earlier trial of the study tells: (seconds of a launch and stop, output tokens/s of one request)
_ASSUMED = {"cpu": (12.0, 40.0), "cuda": (90.0, 150.0)}
_STREAMS_THAT_SCALE = {"cpu": 1, "cuda": 16}  # up to here more requests at once are assumed to give more tokens/s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep that was not run. Times in seconds; `gpu_hours` is None without a GPU."""

    spec: SweepSpec
    results_dir: Path
    start: Sequence[TreeSetting]
    commands: Sequence[str]
    num_legal: int | None
    num_done: int
    num_launches: int
    trial_s: float
    basis: str
    differences: Sequence[str]

    @property
    def total_s(self) -> float:
        """Estimated wall time of the launches that are left."""
        return self.num_launches * self.trial_s

    @property
    def gpu_hours(self) -> float | None:
        """Estimated GPU-hours: wall time × ranks."""
        return self.total_s * self.spec.server.tensor_parallel / 3600 if self.spec.server.device == "cuda" else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "spec": json.loads(json.dumps(self.spec.to_dict())),
            "results_dir": str(self.results_dir),
            "start": [setting.label() for setting in self.start],
            "num_legal_settings": self.num_legal,
            "num_done": self.num_done,
            "num_launches": self.num_launches,
            "trial_s": round(self.trial_s, 1),
            "total_s": round(self.total_s, 1),
            "gpu_hours": None if self.gpu_hours is None else round(self.gpu_hours, 2),
            "basis": self.basis,
            "differences": list(self.differences),
        }

    def text(self) -> str:
        """Return the plan for a person."""
        legal = "too many to list" if self.num_legal is None else str(self.num_legal)
        lines = [to_toml(self.spec.to_dict(), comment="resolved spec"), f"results: {self.results_dir}"]
        lines += ["", f"legal canonical settings: {legal}", "first settings, after the plain arm:"]
        lines += [f"  {setting.label()}" for setting in self.start]
        lines += ["", "command of the first:", f"  {self.commands[0]}"] if self.commands else []
        gpu = "" if self.gpu_hours is None else f", {self.gpu_hours:.1f} GPU-hours"
        lines += ["", f"launches: {self.num_launches} ({self.num_done} trials are done)"]
        lines += [f"estimate: {self.trial_s:.0f} s a launch, {self.total_s / 60:.0f} min in all{gpu} ({self.basis})"]
        lines += ["", "this folder holds another study:", *(f"  {line}" for line in self.differences)] if self.differences else []
        return "\n".join(lines)


def make_plan(spec: SweepSpec, results_dir: Path, backend: Backend, *, reuse_server: bool = False) -> Plan:
    """Return what a sweep would do.

    Raises:
        ValueError: a spec that cannot run, as `run_sweep` raises it.
    """
    spec, space = resolve(spec)
    check_backend(spec, space, backend, reuse_server=reuse_server)
    start = [space.setting(params) for params in start_params(space)]
    settings = space.settings()
    num_legal = None if settings is None else len(settings)
    done = read_trials(results_dir)
    wanted = spec.study.trials if num_legal is None else min(spec.study.trials, num_legal)
    num_launches = max(wanted - len(done), 0) + (read_baseline(results_dir) is None)
    if spec.gates.drift is not None:
        num_launches += num_due(last_measured(read_baselines(results_dir)), len(done), max(wanted, len(done)))
    seconds = [record.timings_s["total"] for record in done if record.state == "complete" and "total" in record.timings_s]
    trial_s, basis = (median(seconds), f"median of {len(seconds)} trials done") if seconds else _assumed(spec)
    return Plan(
        spec=spec,
        results_dir=results_dir,
        start=start[: spec.study.trials],
        commands=[serving_command(spec, setting, backend) for setting in start[:1]],
        num_legal=num_legal,
        num_done=len(done),
        num_launches=num_launches,
        trial_s=trial_s,
        basis=basis,
        differences=_differences(spec, results_dir),
    )


def _assumed(spec: SweepSpec) -> tuple[float, str]:
    """Return the seconds of a trial from stated assumptions, where none was measured yet."""
    launch_s, tok_s = _ASSUMED[spec.server.device]
    load, gates = spec.load, spec.gates
    streams = min(load.max_concurrency or load.num_prompts, _STREAMS_THAT_SCALE[spec.server.device])
    load_s = (load.num_prompts + load.num_warmups) * load.max_tokens / (tok_s * streams)
    if load.request_rate is not None:
        load_s = max(load_s, load.num_prompts / load.request_rate)
    gate_s = gates.num_gate_prompts * gates.gate_max_tokens / tok_s if gates.losslessness else 0.0
    basis = f"assumed: {launch_s:.0f} s to launch and stop, {tok_s:.0f} tok/s a request, {streams} at once"
    return launch_s + gate_s + load_s, basis


def _differences(spec: SweepSpec, results_dir: Path) -> list[str]:
    if not holds_study(results_dir):
        return []
    kept: Mapping[str, Any] = json.loads(json.dumps(SweepSpec.from_toml(results_dir / "study.toml").to_dict()))
    return difference(kept, json.loads(json.dumps(spec.to_dict())))
