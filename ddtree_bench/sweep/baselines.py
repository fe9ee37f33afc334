"""Plain decoding of a sweep: measured before the trials, again while they run and after the last, and how far it drifted.

Each launch of the plain arm is a trial of its own, in baseline-plain, baseline-plain-2, …; its `asked` says after how many trials
it ran. Leaves launching to `ddtree_bench.sweep.run`; the rule for "× plain" stands in `docs/metrics.md`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddtree_bench.records import BASELINE_DIR, TrialRecord, read_trial

MAX_TRIALS_BETWEEN = 10  # a machine that heats up or is shared is seen before the search has ended
AFTER = "after_trials"


def baseline_dir(results_dir: Path, index: int) -> Path:
    """Return the folder of the plain arm's launch `index`, the first being 1."""
    return results_dir / (BASELINE_DIR if index == 1 else f"{BASELINE_DIR}-{index}")


def baseline_asked(num_trials: int) -> dict[str, Any]:
    """Return what is asked of a plain arm that is measured after `num_trials` trials."""
    return {"mode": "plain", AFTER: num_trials}


def index_of(folder: Path) -> int:
    """Return the number of a plain arm's folder."""
    number = folder.name.removeprefix(BASELINE_DIR).removeprefix("-")
    return int(number) if number.isdigit() else 1


def read_baselines(results_dir: Path) -> dict[int, TrialRecord]:
    """Return the completed launches of the plain arm by their number, in order."""
    return {index: record for index, record in read_launches(results_dir).items() if record.state == "complete"}


def read_launches(results_dir: Path) -> dict[int, TrialRecord]:
    """Return every launch of the plain arm by its number, in order; of one that the machine spoiled the last attempt."""
    folders = sorted((file.parent for file in Path(results_dir).glob(f"{BASELINE_DIR}*/trial.json")), key=index_of)
    return {index_of(folder): read_trial(folder / "trial.json") for folder in folders}


def last_measured(baselines: Mapping[int, TrialRecord]) -> int:
    """Return after how many trials plain decoding was last measured."""
    return max((int(record.asked.get(AFTER, 0)) for record in baselines.values()), default=0)


def is_due(last: int, num_trials: int, *, is_over: bool) -> bool:
    """Return whether plain decoding is to be measured again: at the end of a search, and every MAX_TRIALS_BETWEEN trials."""
    return num_trials - last >= (1 if is_over else MAX_TRIALS_BETWEEN)


def num_due(last: int, num_trials: int, num_wanted: int) -> int:
    """Return how often plain decoding will be measured again until a search of `num_wanted` trials is over."""
    count = 0
    for done in range(num_trials, num_wanted + 1):
        if is_due(last, done, is_over=done == num_wanted):
            count, last = count + 1, done
    return count


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far plain decoding moved during a sweep.

    `share` is the largest relative change of ms per token from the first launch, None below two; `limit` None: not checked.
    """

    num_baselines: int
    share: float | None
    limit: float | None

    @property
    def reason(self) -> str | None:
        """Why no factor against plain decoding is told; None where it may be."""
        if self.limit is None or self.num_baselines == 0:
            return None
        if self.share is None:
            return "not told: plain decoding was measured once, so its drift during the sweep is unknown"
        if self.share > self.limit:
            return f"not told: plain decoding drifted by {_percent(self.share)} during the sweep, limit {_percent(self.limit)}"
        return None

    @property
    def text(self) -> str:
        """What a person reads about it."""
        if self.reason is not None:
            return f"× plain {self.reason}"
        if self.share is None:
            return "plain decoding was measured once; drift not checked"
        limit = "no limit" if self.limit is None else f"limit {_percent(self.limit)}"
        return f"plain decoding drifted by {_percent(self.share)} over {self.num_baselines} launches, {limit}"

    def to_dict(self) -> dict[str, Any]:
        """Return the flat form of best.toml and of `sweep --json`."""
        return {**dataclasses.asdict(self), "text": self.text}


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def drift_of(baselines: Sequence[TrialRecord], limit: float | None) -> Drift:
    """Return the drift of the launches of the plain arm, in the order in which they ran."""
    known = [float(record.metrics["ms_per_token"]) for record in baselines if record.metrics.get("ms_per_token")]
    share = max(abs(ms / known[0] - 1.0) for ms in known[1:]) if len(known) > 1 else None
    return Drift(num_baselines=len(baselines), share=share, limit=limit)


def pooled(baselines: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return plain decoding over its launches: tokens over their time for the rates, medians of what cannot be pooled."""
    if len(baselines) < 2:
        return baselines[0] if baselines else None
    rows = [record.metrics for record in baselines]
    names = [name for name in rows[0] if all(_is_number(row.get(name)) for row in rows)]
    metrics = {**rows[0], **{name: median(row[name] for row in rows) for name in names}}
    metrics["ms_per_token"] = _weighted(rows, "ms_per_token", "output_tokens")
    metrics["output_tok_s"] = _weighted(rows, "output_tok_s", "window_s")
    return dataclasses.replace(baselines[0], metrics=metrics)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _weighted(rows: Sequence[Mapping[str, Any]], name: str, weight: str) -> float | None:
    """Return the mean of a rate weighted by what it is a rate of; plain where a weight is unknown, None where a rate is."""
    values = [row.get(name) for row in rows]
    if any(value is None for value in values):
        return None
    weights = [row.get(weight) for row in rows]
    known = [float(w) for w in weights if w]
    shares = known if len(known) == len(rows) else [1.0] * len(rows)
    return sum(float(v) * w for v, w in zip(values, shares, strict=True) if v is not None) / sum(shares)


def as_shown(plain: TrialRecord | None, drift: Drift) -> TrialRecord | None:
    """Return plain decoding as a text shows it: its label tells the drift, and no ms per token where no factor may be."""
    if plain is None or drift.limit is None:
        return plain
    withheld = {"ms_per_token": None} if drift.reason is not None else {}
    return dataclasses.replace(plain, label=f"{plain.label} ({drift.text})", metrics={**plain.metrics, **withheld})
