"""Write results/bars/01-main-job.json from committed results: what the main job's bars asked for, and what was seen.

Reads the evaluation of the pair, a quickstart and its comparison on the CPU, a quickstart on GPUs, and a recorded test run.
Run it from the repository's root: python scripts/main_job_bars.py
"""

from __future__ import annotations

import argparse
import csv
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddtree_bench.records import Bar, read_json, write_bars

BUNDLED = Path("ddtree_bench/models/bundled")
DRAFT_TEMPERATURES = ("0.6", "0.8", "1.0")
TEST_BARS = (
    # bar, what, part of the test ids that hold it
    ("7.2", "shared tree vectors that hold exactly", "tests/tree/test_vectors.py::test_vector["),
    ("7.2", "losslessness on one rank: settings and cases", "tests/engine/test_losslessness.py::"),
    ("7.2", "losslessness at 1, 2 and 8 ranks: the whole grid, and degrees with each other", "tests/engine/test_degrees.py::"),
    ("7.2", "distribution at temperature 1: chi-square holds, and fails for a greedy walk", "chi_square"),
    ("7.3", "up to twenty SIGKILLs, mock servers: no trial lost, no process left", "test_kills.py::test_twenty_kills"),
    ("7.4", "200 clients that leave after the first chunk: KV pages as before", "200_clients"),
    ("7.5", "rows of the pitfalls page name tests that exist", "tests/test_pitfalls_page.py::"),
)
KILL_BARS = (("7.3", "twenty SIGKILLs, real servers on two ranks: no trial lost, no process left", "real-servers"),)


class Evidence:
    """One committed file: where a figure was read, on which machine and by which command it was made."""

    def __init__(self, path: Path, made: dict[str, Any], *, command: str | None = None) -> None:
        self.path = path
        self.machine = made["machine"]
        self.command = command or " ".join(made["command"])

    def bar(self, bar: str, what: str, value: float | int | str, unit: str, limit: str, holds: bool) -> Bar:
        return Bar(
            bar=bar, what=what, value=value, unit=unit, limit=limit, holds=holds,
            machine=self.machine, command=self.command, source=str(self.path),
        )  # fmt: skip


def pair_bars(path: Path) -> Iterator[Bar]:
    """Section 3: size of the pair, prompts, acceptance pooled over the three classes."""
    result = read_json(path)
    evidence = Evidence(path, result["provenance"])
    num_bytes = sum(file.stat().st_size for folder in BUNDLED.glob("tiny-dense*") for file in folder.iterdir())
    yield evidence.bar("3", "both models and their tokenizer", round(num_bytes / 1e6, 2), "MB", "<= 30", num_bytes <= 30e6)
    yield evidence.bar(
        "3", "held-out prompts evaluated", result["num_prompts"], "prompts", ">= 200", result["num_prompts"] >= 200
    )
    for name, temperature, floor in (("greedy", "0.0", 1.15), ("temperature 0.6", "0.6", 1.25)):
        part = result[f"temperature_{temperature}"]
        pooled = part["acceptance_length"]["all"]
        linear, tree = pooled["linear"], max(pooled[f"tree63 at {scale}"] for scale in DRAFT_TEMPERATURES)
        if name == "greedy":
            yield evidence.bar("3", "linear, greedy: acceptance length", linear, "tokens a step", ">= 3.0", linear >= 3.0)
        ratio = round(tree / linear, 4)
        yield evidence.bar("3", f"63-node tree over linear, {name}", ratio, "ratio", f">= {floor}", ratio >= floor)
        share = part["distinct_4grams"]
        yield evidence.bar("3", f"distinct 4-grams, {name}", share, "share", "told beside it", True)


def quickstart_bars(folder: Path) -> Iterator[Bar]:
    """Section 7.1: the quickstart on two cores."""
    best = tomllib.loads((folder / "best.toml").read_text())
    evidence = Evidence(folder / "best.toml", best["provenance"], command="make quickstart")
    measured = best["measured"]
    plain, tree, linear = measured["plain"], measured["tree"], measured["linear"]
    factor = round(plain["ms_per_token"] / measured["best"]["ms_per_token"], 3)
    yield evidence.bar("7.1", "best setting over plain decoding", factor, "ratio of ms a token", "> 1", factor > 1)
    longer = round(tree["acceptance_length"] / linear["acceptance_length"], 3)
    yield evidence.bar("7.1", "best tree over best linear: acceptance length", longer, "ratio", "> 1", longer > 1)
    ledger = Evidence(folder / "ledger.json", best["provenance"], command="make quickstart")
    wall_s = read_json(folder / "ledger.json")["wall_s"]
    comparison = folder / "compare-linear-vs-tree" / "comparison.json"
    compare_s = read_json(comparison)["wall_s"]
    total_s = round(wall_s + compare_s)
    yield ledger.bar("7.1", "sweep and comparison, wall time", total_s, "s", "<= 600", total_s <= 600)


def gpu_bars(folder: Path) -> Iterator[Bar]:
    """Section 7.6: the same spec on CUDA."""
    best = tomllib.loads((folder / "best.toml").read_text())
    first = read_json(folder / "trial-000" / "trial.json")
    evidence = Evidence(folder / "trials.csv", best["provenance"], command=" ".join(first["provenance"]["command"]))
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    num_complete, limit = sum(row["state"] == "complete" for row in rows), f"= {len(rows)}"
    what = "quickstart on CUDA: complete trials"
    yield evidence.bar("7.6", what, num_complete, "trials", limit, num_complete == len(rows))


def test_bars(path: Path, wanted: Sequence[tuple[str, str, str]]) -> Iterator[Bar]:
    """Sections 7.2 to 7.5: tests of a recorded run."""
    record = read_json(path)
    evidence = Evidence(path, record["provenance"])
    for bar, what, part in wanted:
        outcomes = [outcome for test, outcome in record["tests"].items() if part in test]
        num_passed = outcomes.count("passed")
        holds = num_passed == len(outcomes) > 0
        yield evidence.bar(bar, what, num_passed, "tests passed", f"= {len(outcomes)}, none skipped", holds)


def suite_bar(path: Path) -> Bar:
    """Section 7.1: the whole of make test."""
    record = read_json(path)
    num_failed, num_passed = record["totals"].get("failed", 0), record["totals"]["passed"]
    evidence = Evidence(path, record["provenance"], command="make test")
    return evidence.bar("7.1", f"make test: failed, beside {num_passed} passed", num_failed, "tests", "= 0", num_failed == 0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--evaluation", type=Path, default=Path("results/h200-x1/tiny-dense/evaluation.json"))
    options.add_argument("--quickstart", type=Path, default=Path("results/cpu-x86_64-2c/quickstart"))
    options.add_argument("--gpu", type=Path, default=Path("results/h200-x2/quickstart"))
    options.add_argument("--tests", type=Path, default=Path("results/cpu-x86_64-2c/tests.json"))
    options.add_argument("--kills", type=Path, default=Path("results/cpu-x86_64-2c/kills.json"))
    chosen = options.parse_args()
    bars = [
        *pair_bars(chosen.evaluation),
        *quickstart_bars(chosen.quickstart),
        *gpu_bars(chosen.gpu),
        suite_bar(chosen.tests),
        *test_bars(chosen.tests, TEST_BARS),
        *test_bars(chosen.kills, KILL_BARS),
    ]
    write_bars(Path("results/bars/01-main-job.json"), bars)
    for bar in bars:
        print(f"{'holds ' if bar.holds else 'MISSED'} {bar.bar:4} {bar.what}: {bar.value} {bar.unit} ({bar.limit})")


if __name__ == "__main__":
    main()
