"""Studies made of records alone: a full one, and the thin ones that break plots."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path

from ddtree_bench.config import TreeSetting
from ddtree_bench.records import Failure, GateResult, TrialRecord, write_json
from ddtree_bench.report.study import StudyResults


def trial(number: int, setting: TreeSetting, tok_s: float | None, acceptance: float | None, **changes: object) -> TrialRecord:
    """Return a complete trial with the given figures."""
    effective = dataclasses.asdict(setting.canonical())
    survival = [] if acceptance is None else [math.exp(-(d + 0.5) / acceptance) for d in range(setting.max_depth)]
    values: dict = {
        "number": number,
        "state": "complete",
        "asked": dataclasses.asdict(setting),
        "effective": effective,
        "label": setting.canonical().label(),
        "metrics": {
            "output_tok_s": tok_s,
            "acceptance_length": acceptance,
            "ms_per_token": None if tok_s is None else 8000.0 / tok_s,
            "ttft_p50_ms": 31.0,
            "tpot_p50_ms": None if tok_s is None else 7200.0 / tok_s,
            "depth_survival": survival if setting.mode != "plain" else None,
            "num_requests": 32,
            "num_failed_requests": 0,
        },
        "gates": (GateResult(name="losslessness", passed=True, detail="3 of 3 prompts exact"),),
        "timings_s": {"launch": 4.0, "load": 20.0, "total": 26.0},
        "command": ["ddtree-bench", "serve", "--model", "tiny-dense", *setting.flags()],
        "provenance": {
            "machine": "cpu-x86_64-2c",
            "commit": "0" * 40,
            "is_dirty": False,
            "when_utc": "2025-01-01T00:00:00+00:00",
            "versions": {"torch": "2.9.0", "optuna": "5.0.0"},
            "gpus": [],
        },
    }
    return TrialRecord(**(values | changes))


def failed(number: int, setting: TreeSetting) -> TrialRecord:
    """Return a trial that ended out of memory."""
    failure = Failure(
        kind="out_of_memory", reason="the server ran out of memory", is_own_fault=True, log_tail=["CUDA <out of memory>"]
    )
    return trial(number, setting, None, None, state="failed", failure=failure, metrics={}, gates=())


def full_trials() -> list[TrialRecord]:
    """Return plain, three linear and 28 tree trials over a plausible cost curve, two of which failed."""
    rng = random.Random(4)
    trials = [trial(0, TreeSetting(mode="plain"), 1000.0, 1.0)]
    for depth in (4, 7, 15):
        number = len(trials)
        trials.append(trial(number, TreeSetting(mode="linear", depth=depth), 1900 + 90 * (depth == 7), 2.4 + 0.05 * depth))
    for budget in (3, 7, 15, 31, 63, 127, 255):
        for block_size, top_k in ((8, 4), (16, 4), (16, 8), (8, 8)):
            number = len(trials)
            setting = TreeSetting(block_size=block_size, top_k=top_k, node_budget=budget, draft_temperature=0.8)
            if budget == 255 and block_size == 16:
                trials.append(failed(number, setting))
                continue
            acceptance = 1.6 + 0.62 * math.log2(budget + 1) * (1.05 if block_size == 16 else 0.95) * (1 + 0.01 * top_k)
            cost = 1.7 + 0.012 * budget + 0.00007 * budget**2
            tok_s = 1500 * acceptance / cost / 1.4 * rng.uniform(0.97, 1.03)
            trials.append(trial(number, setting, tok_s, acceptance))
    return trials


def study_of(trials: list[TrialRecord], **spec: object) -> StudyResults:
    """Return a study held in memory."""
    return StudyResults(folder=Path("study"), spec={"study": spec}, trials=trials)


def write_study(folder: Path, trials: list[TrialRecord]) -> Path:
    """Write the folder that a sweep would leave."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(
        '[study]\nname = "quickstart"\nseed = 3\n\n[server]\nmodel = "tiny-dense"\n', encoding="utf-8"
    )
    for one in trials:
        write_json(folder / f"trial-{one.number:03d}" / "trial.json", one.to_dict())
    (folder / "best.sh").write_text(
        "#!/bin/sh\nddtree-bench serve --model tiny-dense --mode tree --node-budget 31\n", encoding="utf-8"
    )
    return folder


TREE = TreeSetting(node_budget=7)
THIN: dict[str, Callable[[], StudyResults]] = {
    "nothing": lambda: study_of([]),
    "one trial": lambda: study_of([trial(0, TREE, 100.0, 2.0)]),
    "only failures": lambda: study_of([failed(0, TREE), failed(1, TREE)]),
    "one objective": lambda: study_of(
        [trial(i, TreeSetting(node_budget=3 + i), 90.0 + i, None) for i in range(12)], objectives=["output_tok_s"]
    ),
    "all ties": lambda: study_of([trial(i, TreeSetting(node_budget=3 + i), 100.0, 2.0) for i in range(12)]),
    "only plain": lambda: study_of([trial(0, TreeSetting(mode="plain"), 50.0, 1.0)]),
}
