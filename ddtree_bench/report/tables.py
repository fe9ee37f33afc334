"""The tables of a report as plain rows: settings by ms per token, gates, failures, provenance. Plain data, no drawing."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_bench.records import TrialRecord
from ddtree_bench.report.study import StudyResults, best_of


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting of the result table; None where unknown. `times_plain` and `times_linear` are ms per token of those / own.

    `times_plain` is None where plain decoding drifted too far, or nobody knows how far.
    """

    label: str
    mode: str
    ms_per_token: float | None
    output_tok_s: float | None
    acceptance_length: float | None
    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    times_plain: float | None
    times_linear: float | None
    num_trials: int
    trials: Sequence[int]
    is_best: bool
    is_within_constraints: bool


@dataclass(frozen=True, kw_only=True)
class FailureRow:
    """One trial that does not count, with its reason and the end of its log."""

    number: int
    label: str
    kind: str
    reason: str
    log_tail: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """One gate over all trials; `details` are those of the trials that did not pass it."""

    name: str
    num_passed: int
    num_failed: int
    num_unknown: int
    details: Sequence[str]


def figure(value: float | None, digits: int = 2) -> str:
    """Return a figure, or a dash where it is unknown."""
    return "–" if value is None else f"{value:,.{digits}f}"


def setting_rows(study: StudyResults) -> list[SettingRow]:
    """Return the settings that count by ms per token, never by acceptance."""
    settings = study.settings
    best = {mode: best_of(settings, mode) for mode in ("plain", "linear", "tree")}
    fastest = best_of(settings)
    return [
        SettingRow(
            label=s.label,
            mode=s.mode,
            ms_per_token=s.ms_per_token,
            output_tok_s=s.output_tok_s,
            acceptance_length=s.acceptance_length if s.mode != "plain" else None,
            ttft_p50_ms=s.metrics.get("ttft_p50_ms"),
            tpot_p50_ms=s.metrics.get("tpot_p50_ms"),
            times_plain=_times(best["plain"], s) if study.drift.reason is None else None,
            times_linear=_times(best["linear"], s),
            num_trials=len(s.numbers),
            trials=s.numbers,
            is_best=s is fastest,
            is_within_constraints=s.is_within_constraints,
        )
        for s in settings
    ]


def _times(baseline: Any, setting: Any) -> float | None:
    if baseline is None or not setting.ms_per_token or baseline.ms_per_token is None:
        return None
    return float(baseline.ms_per_token / setting.ms_per_token)


def failure_rows(study: StudyResults) -> list[FailureRow]:
    """Return every trial that failed or failed a gate, the baseline included."""
    rows = []
    for trial in _everything(study):
        gates = trial.failed_gates
        if trial.failure is not None:
            rows.append(_failure(trial, trial.failure.kind, trial.failure.reason, trial.failure.log_tail))
        elif gates:
            details = "; ".join(f"{gate.name}: {gate.detail}" for gate in trial.gates if gate.passed is False)
            rows.append(_failure(trial, "gate", details, ()))
    return rows


def _failure(trial: TrialRecord, kind: str, reason: str, log_tail: Sequence[str]) -> FailureRow:
    return FailureRow(number=trial.number, label=trial.label, kind=kind, reason=reason, log_tail=list(log_tail))


def gate_rows(study: StudyResults) -> list[GateRow]:
    """Return one row a gate, in the order in which trials list them."""
    found: dict[str, list[tuple[int, bool | None, str]]] = {}
    for trial in _everything(study):
        for gate in trial.gates:
            found.setdefault(gate.name, []).append((trial.number, gate.passed, gate.detail))
    rows = []
    for name, results in found.items():
        passed = Counter(result for _, result, _ in results)
        details = [f"trial {number}: {detail}" for number, result, detail in results if result is not True and detail]
        rows.append(
            GateRow(
                name=name, num_passed=passed[True], num_failed=passed[False], num_unknown=passed[None], details=_distinct(details)
            )
        )
    return rows


def _distinct(details: Sequence[str], most: int = 4) -> list[str]:
    """Return the first of each text (trial numbers left aside)."""
    first = {detail.partition(": ")[2]: detail for detail in reversed(details)}
    return list(reversed(list(first.values())))[:most]


def provenance_rows(study: StudyResults) -> list[tuple[str, str]]:
    """Return where the numbers come from; a value that differs between trials is shown as all of them."""
    records = _everything(study)
    sources = [record.provenance for record in records if record.provenance]
    if not sources:
        return []
    rows = [
        ("machine", _all(sources, lambda p: p.get("machine"))),
        ("processor", _all(sources, lambda p: p.get("cpu"))),
        ("GPUs", _all(sources, lambda p: _gpus(p.get("gpus") or []))),
        ("versions", _all(sources, lambda p: _versions(p))),
        ("commit", _all(sources, lambda p: p.get("commit"))),
        ("uncommitted changes", _all(sources, lambda p: {True: "yes", False: "no"}.get(p.get("is_dirty")))),
        ("measured", _span([str(p.get("when_utc")) for p in sources if p.get("when_utc")])),
    ]
    return [(name, value) for name, value in rows if value]


def _all(sources: Sequence[Mapping[str, Any]], read: Any) -> str:
    return " and ".join(dict.fromkeys(str(value) for source in sources if (value := read(source))))


def _gpus(gpus: Sequence[Mapping[str, str]]) -> str | None:
    if not gpus:
        return None
    return f"{len(gpus)} × {gpus[0].get('name')}, driver {gpus[0].get('driver')}"


def _versions(provenance: Mapping[str, Any]) -> str:
    versions = {"python": provenance.get("python"), **(provenance.get("versions") or {})}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _span(times: Sequence[str]) -> str:
    return "" if not times else min(times) if min(times) == max(times) else f"{min(times)} to {max(times)}"


def serving_command(study: StudyResults) -> str | None:
    """Return what best.sh runs, its comments left out; without one, the command of the fastest setting."""
    if study.serving_command is not None:
        lines = [line for line in study.serving_command.splitlines() if line and not line.startswith(("#", "set -"))]
        return "\n".join(line.removeprefix("exec ").replace(' "$@"', "") for line in lines)
    for row in setting_rows(study):
        command = next((t.command for t in study.trials if t.number in row.trials and row.is_best and t.command), None)
        if command:
            return shlex.join(command)
    return None


def _everything(study: StudyResults) -> list[TrialRecord]:
    return [*study.baselines, *study.trials]
