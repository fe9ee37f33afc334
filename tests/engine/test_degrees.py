"""Every setting gives the tokens of plain decoding at tensor-parallel degrees 1, 2 and 8, and the degrees give each other's.

The whole grid of a degree runs in one group of processes (`lockstep_rank`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import CHAINS, PLAIN, SHAPED, TREES, engine_of, outputs, prompt_of, request_of

from ddtree_bench.engine.noise import gumbel_noise
from ddtree_bench.engine.settings import EngineSettings, thread_environment

Run = dict[str, Any]
Record = Callable[[str, object], None]
DEGREES = (1, 2, 8)
NUM_TOKENS = 12
GRID_TIMEOUT_S = 280
CASES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 11}}
BATCHES = (1, 5)
PROMPTS = {f"r{i}": prompt_of(i, 3 + 5 * i) for i in range(5)}
SETTINGS = [*CHAINS, *TREES, SHAPED[0]]
# Scores of the tiny model are of order 1; what float32 sums of its width in another order differ by stays below this.
TIE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What the ranks of one degree saw."""

    runs: list[Run]
    seconds: float

    @property
    def by_key(self) -> dict[tuple[str, str, int], Run]:
        return {(run["setting"], run["case"], run["batch"]): run for run in self.runs}


def run_grid(pair: Path, degree: int, folder: Path) -> Grid:
    """Run every setting on `degree` ranks and return the runs, which every rank must have seen alike."""
    start = time.monotonic()
    job = {
        "parent_pid": os.getpid(),
        "pair": str(pair),
        "degree": degree,
        "settings": [dataclasses.asdict(setting) for setting in SETTINGS],
        "prompts": PROMPTS,
        "cases": CASES,
        "batches": BATCHES,
        "num_tokens": NUM_TOKENS,
        "hit_rate": 0.75,
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | thread_environment(EngineSettings(tensor_parallel=degree, threads=1))
    program = str(Path(__file__).with_name("lockstep_rank.py"))
    ranks = []
    for rank in range(degree):
        with (folder / f"rank{rank}.log").open("wb") as log:
            command = [sys.executable, program, str(folder / "job.json"), str(rank)]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        _wait(ranks, folder)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    first, *others = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(degree)]
    assert all(other == first for other in others), "every rank must see the same tokens"
    return Grid(runs=first, seconds=time.monotonic() - start)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for all ranks; when one fails the others wait for it in vain or fail with it, so all that failed are shown."""
    deadline = time.monotonic() + GRID_TIMEOUT_S
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        logs = [f"rank {rank} failed:\n{(folder / f'rank{rank}.log').read_text()}" for rank in failed]
        assert not failed, "\n".join(logs)
        assert time.monotonic() < deadline, f"the grid must end within {GRID_TIMEOUT_S} s"
        time.sleep(0.05)
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, (folder / f"rank{rank}.log").read_text()


@pytest.fixture(scope="module")
def grid_of_1(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return run_grid(pair, 1, tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def grid_of_2(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return run_grid(pair, 2, tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def grid_of_8(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return run_grid(pair, 8, tmp_path_factory.mktemp("grid"))


def accepted_lengths(runs: Sequence[Run]) -> Counter[int]:
    """Return how many verify steps accepted exactly so many draft tokens."""
    lengths: Counter[int] = Counter()
    for run in runs:
        at_least = [run["num_verify_steps"], *run["accepted_per_depth"], 0]
        lengths.update({length: at_least[length] - at_least[length + 1] for length in range(len(at_least) - 1)})
    return +lengths


@pytest.mark.slow
@pytest.mark.parametrize("degree", DEGREES)
def test_every_setting_gives_the_tokens_of_plain_decoding_at_its_degree(
    degree: int, request: pytest.FixtureRequest, record_property: Record
) -> None:
    grid: Grid = request.getfixturevalue(f"grid_of_{degree}")
    runs = grid.runs
    keys = {(setting.label(), case, batch) for setting in (PLAIN, *SETTINGS) for case in CASES for batch in BATCHES}
    assert grid.by_key.keys() == keys, "the grid must be complete"
    assert all(len(run["tokens"]) == run["batch"] for run in runs)
    plain = {case: grid.by_key[PLAIN.label(), case, len(PROMPTS)]["tokens"] for case in CASES}
    assert plain["greedy"] != plain["sampled"]
    differing = [
        (run["setting"], run["case"], run["batch"], name)
        for run in runs
        for name, tokens in run["tokens"].items()
        if tokens != plain[run["case"]][name] or len(tokens) != NUM_TOKENS
    ]
    assert differing == []
    lengths = accepted_lengths(runs)
    assert all(lengths[length] > 0 for length in range(11)), f"walks of every length up to 10 must occur; {lengths}"
    for setting in (CHAINS[2], TREES[7], TREES[11]):
        own = accepted_lengths([run for run in runs if run["setting"] == setting.label()])
        assert len(own) >= 4, f"{setting.label()} must take walks of many lengths; {own}"
        assert max(own) >= 7, f"{setting.label()} must take long walks; {own}"
    record_property("settings", 1 + len(SETTINGS))
    record_property("runs compared", len(runs))
    record_property("verify steps by accepted tokens", dict(sorted(lengths.items())))
    record_property("seconds", round(grid.seconds, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(1, 2), (1, 8), (2, 8)])
def test_degrees_give_the_same_tokens_up_to_numeric_ties(
    pair: Path, first: int, second: int, request: pytest.FixtureRequest, record_property: Record
) -> None:
    ties = {}
    grids: list[Grid] = [request.getfixturevalue(f"grid_of_{degree}") for degree in (first, second)]
    assert grids[0].by_key.keys() == grids[1].by_key.keys()
    for key, one in grids[0].by_key.items():
        other = grids[1].by_key[key]
        assert one["tokens"].keys() == other["tokens"].keys()
        for name, tokens in one["tokens"].items():
            if tokens != other["tokens"][name]:
                ties[one["case"], name] = gap_at_first_difference(pair, name, CASES[one["case"]], tokens, other["tokens"][name])
    assert all(gap <= TIE for gap in ties.values()), f"degrees may differ only at a tie within {TIE}; {ties}"
    record_property("runs compared", len(grids[0].runs))
    record_property("numeric ties", len(ties))
    for (case, name), gap in ties.items():
        record_property(f"gap of {case} {name}", gap)


def scores_after(pair: Path, tokens: Sequence[int], sampling: dict[str, Any]) -> torch.Tensor:
    """Return what one rank's choice after these tokens is the argmax of, float32 [vocabulary]."""
    engine = engine_of(pair)
    logits, rows = engine.runner.logits, []

    def recorded(hidden_RD: torch.Tensor) -> torch.Tensor:
        rows.append(logits(hidden_RD))
        return rows[-1]

    engine.runner.logits = recorded  # type: ignore[method-assign]
    engine.generate([request_of("r", tokens, max_tokens=1, **sampling)])
    scores_V = rows[0][0, : engine.vocab_size]
    if "seed" in sampling:
        noise_BNV = gumbel_noise([sampling["seed"]], torch.tensor([[len(tokens)]]), 0, engine.vocab_size)
        scores_V = scores_V / sampling["temperature"] + noise_BNV[0, 0]
    return scores_V


def gap_at_first_difference(pair: Path, name: str, sampling: dict[str, Any], one: Sequence[int], other: Sequence[int]) -> float:
    """Return how far apart the two tokens score that two degrees chose where their outputs part."""
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    scores_V = scores_after(pair, [*PROMPTS[name], *one[:place]], sampling)
    return abs(float(scores_V[one[place]] - scores_V[other[place]]))


@pytest.mark.parametrize("case", CASES)
def test_only_tokens_that_tie_pass_for_a_tie(pair: Path, case: str) -> None:
    sampling = CASES[case]
    tokens = outputs(engine_of(pair), [request_of("r2", PROMPTS["r2"], max_tokens=NUM_TOKENS, **sampling)])["r2"]
    for place in (0, 1, 7, NUM_TOKENS - 1):
        scores_V = scores_after(pair, [*PROMPTS["r2"], *tokens[:place]], sampling)
        best, second = scores_V.topk(2).indices.tolist()
        assert best == tokens[place], "the scores must be those that plain decoding chooses by"
        changed = [*tokens[:place], second, *tokens[place + 1 :]]
        gap = gap_at_first_difference(pair, "r2", sampling, tokens, changed)
        assert gap == pytest.approx(float(scores_V[best] - scores_V[second]))
        assert gap > 10 * TIE, "the second best token of these is no tie"
