"""What a results folder holds, read once, and its trials folded into settings (replicates together)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ddtree_bench.config import read_toml
from ddtree_bench.records import TrialRecord, read_json, read_trials
from ddtree_bench.sweep.baselines import Drift, drift_of, pooled, read_launches


@dataclass(frozen=True, kw_only=True)
class StudyResults:
    """Everything that the report shows of one study."""

    folder: Path
    spec: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[TrialRecord] = ()
    baselines: Sequence[TrialRecord] = ()
    serving_command: str | None = None
    comparisons: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        """The study's own name, or its folder's."""
        return str(self.spec.get("study", {}).get("name") or self.folder.name)

    @property
    def settings(self) -> list[Setting]:
        """Return the settings of the trials and of plain decoding beside them that count, fastest first."""
        return settings_of([*self.baselines, *self.trials])

    @property
    def drift(self) -> Drift:
        """How far plain decoding moved between its launches; the limit is the study's own."""
        limit = self.spec.get("gates", {}).get("drift")
        return drift_of([one for one in self.baselines if one.counts], None if limit == "none" else limit)

    @property
    def objectives(self) -> list[str]:
        """What the study searched for; tok/s and acceptance where the spec is not there."""
        return list(self.spec.get("study", {}).get("objectives") or ("output_tok_s", "acceptance_length"))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting over its replicates: medians of what is timed, acceptance pooled. Only trials that count are in it.

    Plain decoding, measured several times beside the trials, is pooled: tokens over their time.
    """

    label: str
    mode: str
    knobs: Mapping[str, Any]
    numbers: Sequence[int]
    output_tok_s: float | None
    acceptance_length: float | None
    ms_per_token: float | None
    metrics: Mapping[str, Any]
    low_tok_s: float | None
    high_tok_s: float | None
    is_within_constraints: bool


def read_study(folder: Path) -> StudyResults:
    """Read a results folder.

    Raises:
        FileNotFoundError: no such folder, or nothing of a study in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"the results folder must exist; given {str(folder)!r}")
    spec_file, script = folder / "study.toml", folder / "best.sh"
    trials = read_trials(folder)
    comparisons = [_read_comparison(file) for file in sorted(folder.glob("compare-*/comparison.json"))]
    if not (spec_file.exists() or trials or comparisons):
        raise FileNotFoundError(f"the folder must hold study.toml, trial-NNN/trial.json or compare-*/; given {str(folder)!r}")
    return StudyResults(
        folder=folder,
        spec=_read_spec(spec_file) if spec_file.exists() else {},
        trials=trials,
        baselines=list(read_launches(folder).values()),
        serving_command=script.read_text(encoding="utf-8").strip() if script.exists() else None,
        comparisons=comparisons,
    )


def _read_comparison(file: Path) -> Mapping[str, Any]:
    result = read_json(file)
    if not isinstance(result, Mapping) or not {"pairs", "arms", "ranking", "notes"} <= result.keys():
        raise ValueError(f"{file} must hold the result of one comparison; it does not; move its folder away, or compare again")
    return result


def _read_spec(file: Path) -> Mapping[str, Any]:
    spec = read_toml(file)
    for name, table in spec.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{file} must hold tables; given {name} = {table!r}; it is not a sweep's own study.toml")
    return spec


def mode_of(trial: TrialRecord) -> str:
    """Return plain, linear or tree."""
    return str(trial.effective.get("mode") or trial.asked.get("mode") or "tree")


def searched_mode(trials: Sequence[TrialRecord]) -> str:
    """Return the mode whose knobs a study searched: tree, or linear where no tree was tried."""
    return "tree" if any(mode_of(trial) == "tree" for trial in trials) or not trials else "linear"


def settings_of(trials: Sequence[TrialRecord]) -> list[Setting]:
    """Return the settings of the trials that count, replicates folded, fastest first (unknown speed last)."""
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        if trial.counts:
            groups.setdefault(json.dumps(dict(trial.effective), sort_keys=True) or trial.label, []).append(trial)
    return sorted(
        (_fold(group) for group in groups.values()), key=lambda s: (s.ms_per_token is None, s.ms_per_token or 0, s.label)
    )


def _fold(group: Sequence[TrialRecord]) -> Setting:
    def middle(name: str) -> float | None:
        values = [float(t.metrics[name]) for t in group if t.metrics.get(name) is not None]
        return median(values) if values else None

    numeric = {name for t in group for name, value in t.metrics.items() if isinstance(value, int | float)}
    plain = pooled(group) if mode_of(group[0]) == "plain" else None
    rates = [float(t.metrics["output_tok_s"]) for t in group if t.metrics.get("output_tok_s") is not None]
    violated = any(value > 0 for t in group for value in t.constraints.values())
    return Setting(
        label=group[0].label,
        mode=mode_of(group[0]),
        knobs=dict(group[0].effective),
        numbers=[t.number for t in group],
        output_tok_s=middle("output_tok_s") if plain is None else plain.metrics.get("output_tok_s"),
        acceptance_length=_pooled_acceptance(group),
        ms_per_token=middle("ms_per_token") if plain is None else plain.metrics.get("ms_per_token"),
        metrics={**group[0].metrics, **{name: middle(name) for name in numeric}},
        low_tok_s=min(rates, default=None),
        high_tok_s=max(rates, default=None),
        is_within_constraints=not violated,
    )


def _pooled_acceptance(group: Sequence[TrialRecord]) -> float | None:
    steps = sum(t.metrics.get("num_verify_steps") or 0 for t in group)
    if steps and all(t.metrics.get("num_accepted") is not None for t in group):
        return 1.0 + sum(t.metrics["num_accepted"] for t in group) / steps
    values = [float(t.metrics["acceptance_length"]) for t in group if t.metrics.get("acceptance_length") is not None]
    return median(values) if values else None


def best_of(settings: Sequence[Setting], mode: str | None = None) -> Setting | None:
    """Return the fastest setting (of a mode) by ms per token, within constraints where any is."""
    rows = [s for s in settings if s.mode == (mode or s.mode) and s.ms_per_token is not None]
    return min(rows, key=lambda s: (not s.is_within_constraints, s.ms_per_token or 0.0), default=None)
