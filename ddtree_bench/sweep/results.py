"""The files of a study's results folder, each written whole or not at all, and each a fold over the trial records."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_bench.backends import Backend
from ddtree_bench.config import SPACE_KEYS, SweepSpec, TreeSetting
from ddtree_bench.errors import DdtreeError
from ddtree_bench.records import BASELINE_DIR, TrialRecord, read_trial, read_trials, write_json, write_text
from ddtree_bench.sweep.baselines import Drift, as_shown, drift_of, pooled, read_baselines
from ddtree_bench.sweep.objective import best_trial, pareto_front, setting_of
from ddtree_bench.sweep.toml import to_toml

MAY_CHANGE = ("study.trials", "study.timeout_s")  # on resume; everything else would mix two studies
_SHOWN = ("output_tok_s", "ms_per_token", "acceptance_length", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
_MADE = ("run", "machine", "gpu", "commit", "is_dirty", "when_utc")  # provenance of each row
_COLUMNS = ("trial", "state", "is_feasible", "label", "mode", *SPACE_KEYS, "verify_width", *_SHOWN, "failure", "total_s", *_MADE)


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep found. `front` and the bests hold feasible trials only; None where there is none.

    `plain` is plain decoding pooled over its launches, `drift` how far it moved between them.
    """

    results_dir: Path
    plain: TrialRecord | None
    drift: Drift
    trials: Sequence[TrialRecord]
    front: Sequence[TrialRecord]
    best: TrialRecord | None
    best_linear: TrialRecord | None
    best_tree: TrialRecord | None
    command: str | None
    ledger: Mapping[str, Any]
    num_repeats: int = 0
    is_exhausted: bool = False

    @property
    def baseline(self) -> TrialRecord | None:
        """Plain decoding as a text shows it: without ms per token where the drift allows no factor against it."""
        return as_shown(self.plain, self.drift)

    def to_dict(self) -> dict[str, Any]:
        """Return the short JSON form that `sweep --json` prints."""
        known = {"baseline": self.plain, "best": self.best, "best_linear": self.best_linear, "best_tree": self.best_tree}
        return {
            "results_dir": str(self.results_dir),
            "num_trials": len(self.trials),
            "num_failed": sum(trial.state == "failed" for trial in self.trials),
            "num_repeats": self.num_repeats,
            "is_exhausted": self.is_exhausted,
            **{name: None if record is None else _short(record) for name, record in known.items()},
            "drift": self.drift.to_dict(),
            "front": [_short(trial) for trial in self.front],
            "command": self.command,
            "ledger": dict(self.ledger),
        }


def trial_dir(results_dir: Path, number: int) -> Path:
    """Return the folder of a trial."""
    return results_dir / f"trial-{number:03d}"


def collect(spec: SweepSpec, results_dir: Path, backend: Backend, **more: Any) -> SweepResult:
    """Read the records of a results folder and fold them into the sweep's result."""
    trials = read_trials(results_dir)
    best = best_trial(trials)
    baselines = list(read_baselines(results_dir).values())
    return SweepResult(
        results_dir=results_dir,
        plain=pooled(baselines),
        drift=drift_of(baselines, spec.gates.drift),
        trials=trials,
        front=pareto_front(trials, spec.study.objectives),
        best=best,
        best_linear=best_trial(trials, "linear"),
        best_tree=best_trial(trials, "tree"),
        command=None if best is None else serving_command(spec, setting_of(best), backend),
        ledger=ledger(spec, results_dir),
        **more,
    )


def write_results(spec: SweepSpec, result: SweepResult) -> None:
    """Write trials.csv, pareto.csv, ledger.json, and best.toml with best.sh once there is a best."""
    folder, run = result.results_dir, spec.study.name
    write_text(folder / "trials.csv", trials_csv(result.trials, run=run))
    write_text(folder / "pareto.csv", trials_csv(result.front, run=run))
    write_json(folder / "ledger.json", {**result.ledger, "provenance": {"run": run, **_newest_provenance(result)}})
    if result.best is None or result.command is None:
        for name in ("best.toml", "best.sh"):
            (folder / name).unlink(missing_ok=True)
        return
    write_text(folder / "best.toml", _best_toml(spec, result))
    write_text(folder / "best.sh", _best_sh(spec, result.best, result.command))
    (folder / "best.sh").chmod(0o755)


def _newest_provenance(result: SweepResult) -> Mapping[str, Any]:
    """Return where the newest of the launches that a file sums up was made."""
    made = [record.provenance for record in (result.plain, *result.trials) if record is not None]
    return max(made, key=lambda one: str(one.get("when_utc") or ""), default={})


def check_same_study(spec: SweepSpec, results_dir: Path, provenance: Mapping[str, Any]) -> bool:
    """Return whether the folder already holds this study; write study.toml, with the provenance of who writes it.

    A study of which nothing was measured yet (a spec with a slip that ended before the first launch) gives way to a new spec.

    Raises:
        DdtreeError: it holds another study; shows every key that differs.
    """
    file = results_dir / "study.toml"
    tables = json.loads(json.dumps(spec.to_dict()))
    exists = holds_study(results_dir)
    if exists:
        kept = json.loads(json.dumps(SweepSpec.from_toml(file).to_dict()))
        if lines := difference(kept, tables):
            shown = "".join(f"\n    {line}" for line in lines)
            raise DdtreeError(
                f"{results_dir} must hold the same study to be continued; these keys differ:{shown}\n"
                "  give the old values, or another --results folder for a new study"
            )
    tables["provenance"] = {"run": spec.study.name, **_flat_provenance(provenance)}
    write_text(file, to_toml(tables, comment="the resolved sweep file of this study"))
    return exists


def holds_study(results_dir: Path) -> bool:
    """Return whether a folder has a study.toml and something that was measured under it."""
    if not (results_dir / "study.toml").exists():
        return False
    return any(results_dir.glob("trial-*/trial.json")) or bool(read_baselines(results_dir))


def difference(kept: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return one line for each key that differs between two specs, those that may change left out."""
    flat_kept, flat_given = _flat(kept), _flat(given)
    names = sorted(flat_kept.keys() | flat_given.keys())
    return [
        f"{name}: the study has {flat_kept.get(name)!r}, given {flat_given.get(name)!r}"
        for name in names
        if name not in MAY_CHANGE and flat_kept.get(name) != flat_given.get(name)
    ]


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}


def serving_command(spec: SweepSpec, setting: TreeSetting, backend: Backend, *, port: int = 8000) -> str:
    """Return the command that serves a setting, as a person types it."""
    return shlex.join(backend.command(spec.server, setting, port=port))


def ledger(spec: SweepSpec, results_dir: Path) -> dict[str, Any]:
    """Return what the study has cost: launches, wall seconds, and GPU-hours (wall × tensor_parallel; None without a GPU)."""
    files = sorted(results_dir.glob("trial-*/trial.json")) + sorted(results_dir.glob("failed-attempts/*/trial.json"))
    files += sorted(results_dir.glob(f"{BASELINE_DIR}*/trial.json"))
    records = [read_trial(file) for file in files]
    wall_s = sum(record.timings_s.get("total", 0.0) for record in records)
    stages = {
        f"{name}_s": round(sum(r.timings_s.get(name, 0.0) for r in records), 1)
        for name in ("launch", "gate", "warm", "load", "stop")
    }
    ranks = spec.server.tensor_parallel
    gpu_hours = round(wall_s * ranks / 3600, 4) if spec.server.device == "cuda" else None
    return {"num_launches": len(records), "wall_s": round(wall_s, 1), **stages, "num_ranks": ranks, "gpu_hours": gpu_hours}


def trials_csv(records: Sequence[TrialRecord], *, run: str | None = None) -> str:
    """Return one row a trial: setting, what it measured, and where; `run` names the study."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for record in records:
        row = {**_row(record), "run": run}
        writer.writerow(["" if row[name] is None else row[name] for name in _COLUMNS])
    return out.getvalue()


def _row(record: TrialRecord) -> dict[str, Any]:
    setting = setting_of(record)
    return {
        "trial": record.number,
        "state": record.state,
        "is_feasible": record.is_feasible,
        "label": record.label,
        "verify_width": setting.verify_width,
        **dataclasses.asdict(setting),
        **{name: record.metrics.get(name) for name in _SHOWN},
        "failure": None if record.failure is None else record.failure.kind,
        "total_s": record.timings_s.get("total"),
        "gpu": "; ".join(_gpus(record.provenance)) or None,
        **{name: record.provenance.get(name) for name in ("machine", "commit", "is_dirty", "when_utc")},
    }


def _short(record: TrialRecord) -> dict[str, Any]:
    names = ("output_tok_s", "ms_per_token", "acceptance_length")
    return {"trial": record.number, "label": record.label, **{name: record.metrics.get(name) for name in names}}


def _best_toml(spec: SweepSpec, result: SweepResult) -> str:
    """[server], [load], then [best], [linear] and [tree]: each a tree setting; [measured] tells what they measured."""
    tables: dict[str, Mapping[str, Any]] = {name: spec.to_dict()[name] for name in ("server", "load")}
    arms = {"best": result.best, "linear": result.best_linear, "tree": result.best_tree}
    for name, record in arms.items():
        if record is not None:
            tables[name] = dataclasses.asdict(setting_of(record))
    for name, record in {**arms, "plain": result.plain}.items():
        if record is not None:
            tables[f"measured.{name}"] = _short(record)
    tables["measured.drift"] = result.drift.to_dict()
    if result.best is not None:
        tables["provenance"] = _flat_provenance(result.best.provenance)
    return to_toml(tables, comment="the fastest settings of this study that failed no gate, by ms per token")


def _flat_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return provenance as TOML can hold it: unknown values left out, GPUs as text."""
    flat: dict[str, Any] = {name: value for name, value in provenance.items() if isinstance(value, str | int | float | bool)}
    flat["gpus"] = _gpus(provenance)
    flat["versions"] = {name: version for name, version in (provenance.get("versions") or {}).items() if version is not None}
    return flat


def _gpus(provenance: Mapping[str, Any]) -> list[str]:
    return [f"{gpu.get('name')}, driver {gpu.get('driver')}" for gpu in provenance.get("gpus") or ()]


def _best_sh(spec: SweepSpec, best: TrialRecord, command: str) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in spec.server.env.items())
    measured = ", ".join(f"{name} {value:.4g}" for name, value in _short(best).items() if isinstance(value, float))
    made = best.provenance
    dirty = ", with uncommitted changes" if made.get("is_dirty") else ""
    return (
        "#!/usr/bin/env bash\n"
        f"# {best.label}: {measured}\n"
        f"# study {spec.study.name}, machine {made.get('machine')}, {made.get('when_utc')}, commit {made.get('commit')}{dirty}\n"
        "# options given to this script win over those below, e.g. --port 8001\n"
        f'set -euo pipefail\n{exports}exec {command} "$@"\n'
    )
