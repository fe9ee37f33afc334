"""Check every operation, then time it: what `ddtree-bench kernels` runs.

An operation takes part by having a `bench.py` in its folder that defines one name, BENCH:

    from ddtree_bench.kernels.bench import Cost, OpBench, Variant

    BENCH = OpBench(
        op="walk_tree",
        test_cases=TEST_CASES,            # small; checked everywhere, through the interpreter where there is no GPU
        bench_cases=BENCH_CASES,          # checked and timed on a GPU; every case has a `name`
        make_inputs=make_inputs,          # (case, seed, device) -> inputs: whatever `run` takes, one object
        check=check,                      # (case, inputs, run) -> None; AssertionError where run(inputs) is wrong
        variants=variants,                # (case, device) -> [Variant(...), ...]
        cost=cost,                        # (case) -> Cost(num_bytes=..., num_flops=...): the least that must be moved
    )

    Variant(name="triton", run=lambda inputs: triton_kernel.walk_tree(**inputs))           # ours; the first is the one in use
    Variant(name="triton-4-warps", run=..., )                                             # ours, another configuration
    Variant(name="torch", run=..., is_ours=False)                                         # an alternative: timed, never checked
    Variant(name="flex", run=..., is_ours=False, is_capturable=False)                     # timed by events, without a graph

`run(inputs)` launches on the current stream, waits for nothing, and returns what `check` compares. `check` calls it
once on the inputs it is given (it may clone them first, or call a reference) and may wait for the device. A variant
that cannot run a case raises Unavailable with the reason. triton, and torch's compiled alternatives, are imported
inside `variants`, never at the head of the file. Inputs that must not come out of the cache are made several times
with different seeds and used in turn, at most `max_input_sets` of them. An operation that writes into its inputs says
`is_in_place`, and every check gets fresh ones.

A case is timed right after its check. Calls are captured in one CUDA graph and replayed; a figure is the median over
replays of the time of one call, with the 20th and 80th percentile. Copy bandwidth and matmul rate are measured in the
same run; the floor of a case is the larger of its bytes over the one and its operations over the other. An illegal
access ends what a process may do on the GPU: what is left of the run is then told as not run, and the result is kept.

Letters: none; the tensors belong to the operations.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

CHECK_SEED, TIMING_SEED = 1001, 2002
_REPLAY_MS, _TOTAL_MS = 1.0, 60.0  # what one graph should take, and what one figure may
_COPY_BYTES, _MATMUL_SIZE = 2**31, 8192
_WARM_UP_S, _NUM_ROUNDS = 0.25, 3  # before a ceiling is measured, and how often; clocks take a while to rise


class Unavailable(Exception):
    """A variant cannot run here or cannot run this case; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The least work of one call: bytes read plus bytes written, and floating-point operations (0 where bytes bind)."""

    num_bytes: int
    num_flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to answer: ours (checked, then timed) or a named alternative (timed only)."""

    name: str
    run: Callable[[Any], Any]
    is_ours: bool = True
    is_capturable: bool = True


@dataclass(frozen=True, kw_only=True)
class OpBench:
    """What an operation gives to the bench; see the head of this file."""

    op: str
    test_cases: Sequence[Any]
    bench_cases: Sequence[Any]
    make_inputs: Callable[[Any, int, str], Any]
    check: Callable[[Any, Any, Callable[[Any], Any]], None]
    variants: Callable[[Any, str], Sequence[Variant]]
    cost: Callable[[Any], Cost]
    max_input_sets: int = 16
    is_in_place: bool = False


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What this GPU was measured to do: a copy counts the bytes read and written; the matmul is in bfloat16."""

    copy_gb_s: float
    matmul_tflop_s: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant on one case; figures are None where nothing was timed.

    Args:
        status: "ok", "failed" (the answer is wrong, or it raised), "unavailable" or "not run" (an earlier variant took the
            GPU's context with it); `reason` says why.
        is_checked: the answer was compared and is right.
        timer: "graph" or "events".
        floor_share: the floor over the median.
        ratio: the median over that of the variant in use.
    """

    op: str
    case: str
    variant: str
    is_ours: bool
    status: str = "ok"
    reason: str | None = None
    is_checked: bool = False
    timer: str | None = None
    num_calls: int | None = None
    num_input_sets: int | None = None
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    floor_us: float | None = None
    floor_share: float | None = None
    gb_s: float | None = None
    copy_share: float | None = None
    tflop_s: float | None = None
    matmul_share: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What one run found; ceilings are None without a GPU."""

    device: str
    ceilings: Ceilings | None
    rows: Sequence[Row] = field(default_factory=list)

    @property
    def failures(self) -> list[Row]:
        """The variants of ours that answered wrong, raised, or could not be run after one that broke the GPU's context."""
        return [row for row in self.rows if row.is_ours and row.status in ("failed", "not run")]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def prepare() -> bool:
    """Tell whether there is a GPU; where there is none, ask Triton for its interpreter, before it is imported."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    return has_gpu


def find_benches(names: Sequence[str] = ()) -> list[OpBench]:
    """Import the `bench.py` of every operation, or of the named ones.

    Raises:
        ValueError: no operation of that name takes part.
    """
    import ddtree_bench.kernels as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{module.name}.bench"
        if module.ispkg and importlib.util.find_spec(name) is not None:
            found[module.name] = name
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise ValueError(f"op must be one of {', '.join(found)}; given {', '.join(unknown)}")
    return [importlib.import_module(found[name]).BENCH for name in names or found]


def run_bench(
    benches: Sequence[OpBench], *, case_filter: str = "", report: Callable[[Row], None] = lambda row: None
) -> BenchResult:
    """Check every operation and, on a GPU, time it; `report` is told of each row as it is found."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    device_name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    ceilings = measure_ceilings() if device == "cuda" else None
    rows: list[Row] = []
    for row in _rows_until_death(benches, device, ceilings, case_filter):
        report(row)
        rows.append(row)
    return BenchResult(device=device_name, ceilings=ceilings, rows=rows)


def _rows_until_death(benches: Sequence[OpBench], device: str, ceilings: Ceilings | None, case_filter: str) -> Iterator[Row]:
    found: set[tuple[str, str, str]] = set()
    for bench in benches:
        for row in _rows_of(bench, device, ceilings, case_filter):
            yield row
            found.add((row.op, row.case, row.variant))
            if row.status == "failed" and _is_context_dead(device):
                reason = f"the GPU context died in {row.variant}"
                for left in _planned(benches, device, case_filter):
                    if (left.op, left.case, left.variant) not in found:
                        yield _with(left, status="not run", reason=reason)
                return


def _planned(benches: Sequence[OpBench], device: str, case_filter: str) -> Iterator[Row]:
    """List what `_rows_of` answers for, without running anything."""
    for bench in benches:
        cases = [(case, [_first_of_ours(bench, case, device)]) for case in bench.test_cases if case_filter in case.name]
        if device == "cuda":
            cases += [(case, list(bench.variants(case, device))) for case in bench.bench_cases if case_filter in case.name]
        for case, variants in cases:
            for variant in variants:
                yield Row(op=bench.op, case=case.name, variant=variant.name, is_ours=variant.is_ours)


def _is_context_dead(device: str) -> bool:
    """Tell whether every further call fails too, as after an illegal access."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _rows_of(bench: OpBench, device: str, ceilings: Ceilings | None, case_filter: str) -> Iterator[Row]:
    for case in bench.test_cases:
        if case_filter in case.name:
            yield _checked(bench, case, _first_of_ours(bench, case, device), bench.make_inputs(case, CHECK_SEED, device))
    if ceilings is None:
        return
    for case in bench.bench_cases:
        if case_filter in case.name:
            yield from _timed_case(bench, case, device, ceilings)
            torch.cuda.empty_cache()


def _first_of_ours(bench: OpBench, case: Any, device: str) -> Variant:
    return next(variant for variant in bench.variants(case, device) if variant.is_ours)


def _checked(bench: OpBench, case: Any, variant: Variant, inputs: Any) -> Row:
    """Check one variant on one case; an alternative is not checked."""
    row = Row(op=bench.op, case=case.name, variant=variant.name, is_ours=variant.is_ours)
    if not variant.is_ours:
        return row
    try:
        bench.check(case, inputs, variant.run)
    except Unavailable as error:
        return _with(row, status="unavailable", reason=str(error))
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is the finding
        return _with(row, status="failed", reason=f"{type(error).__name__}: {error}"[:500])
    return _with(row, is_checked=True)


def _timed_case(bench: OpBench, case: Any, device: str, ceilings: Ceilings) -> Iterator[Row]:
    cost = bench.cost(case)
    variants = bench.variants(case, device)
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    num_sets = max(1, min(bench.max_input_sets, -(-3 * cache_bytes // max(1, cost.num_bytes))))
    sets = [bench.make_inputs(case, TIMING_SEED + place, device) for place in range(num_sets)]
    in_use_us: float | None = None
    check_inputs = None if bench.is_in_place else bench.make_inputs(case, CHECK_SEED, device)
    for variant in variants:
        is_fresh = bench.is_in_place and variant.is_ours
        row = _checked(bench, case, variant, bench.make_inputs(case, CHECK_SEED, device) if is_fresh else check_inputs)
        if row.status == "ok":
            row = _timed(row, variant, sets, cost, ceilings)
        if in_use_us is None and row.is_ours:
            in_use_us = row.median_us
        if in_use_us is not None and row.median_us is not None:
            row = _with(row, ratio=row.median_us / in_use_us)
        yield row


def _timed(row: Row, variant: Variant, sets: Sequence[Any], cost: Cost, ceilings: Ceilings) -> Row:
    try:
        times_us, num_calls, timer = _measure_either(variant, sets)
    except (Unavailable, torch.OutOfMemoryError) as error:
        return _with(row, status="unavailable", reason=str(error)[:500])
    except Exception as error:  # noqa: BLE001  an alternative that fails must not end the bench
        return _with(row, status="failed", reason=f"{type(error).__name__}: {error}"[:500])
    median_us = statistics.median(times_us)
    deciles = statistics.quantiles(times_us, n=10)
    gb_s, tflop_s = cost.num_bytes / median_us / 1e3, cost.num_flops / median_us / 1e6
    floor_us = max(cost.num_bytes / ceilings.copy_gb_s / 1e3, cost.num_flops / ceilings.matmul_tflop_s / 1e6)
    return _with(
        row,
        timer=timer,
        num_calls=num_calls,
        num_input_sets=len(sets),
        median_us=median_us,
        p20_us=deciles[1],
        p80_us=deciles[7],
        floor_us=floor_us,
        floor_share=floor_us / median_us,
        gb_s=gb_s,
        copy_share=gb_s / ceilings.copy_gb_s,
        tflop_s=tflop_s,
        matmul_share=tflop_s / ceilings.matmul_tflop_s,
    )


def _measure_either(variant: Variant, sets: Sequence[Any]) -> tuple[list[float], int, str]:
    """Time by a graph, or an alternative that no graph takes by events."""
    try:
        return measure(variant.run, sets, is_capturable=variant.is_capturable)
    except RuntimeError:
        if variant.is_ours or not variant.is_capturable:
            raise
        torch.cuda.synchronize()
        return measure(variant.run, sets, is_capturable=False)


def _with(row: Row, **changes: Any) -> Row:
    return Row(**(asdict(row) | changes))


def measure_ceilings() -> Ceilings:
    """Measure the device-to-device copy, the faster of a kernel and a memcpy, and the bfloat16 matmul on random data."""
    return Ceilings(copy_gb_s=2 * _COPY_BYTES / _copy_us() / 1e3, matmul_tflop_s=2 * _MATMUL_SIZE**3 / _matmul_us() / 1e6)


def _copy_us() -> float:
    source, target = (torch.empty(_COPY_BYTES // 4, device="cuda").normal_() for _ in range(2))
    return _best_us(lambda: torch.add(source, 0, out=target), lambda: target.copy_(source))


def _matmul_us() -> float:
    shape = (_MATMUL_SIZE, _MATMUL_SIZE)
    left, right, out = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(3))
    return _best_us(lambda: torch.mm(left, right, out=out))


def _best_us(*launches: Callable[[], Any]) -> float:
    """Return the least median of a few rounds of the launches in turn, warm; each takes long enough to need no graph."""
    end = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end:
        for launch in launches:
            launch()
        torch.cuda.synchronize()
    one_ms = [_event_ms(launch) for launch in launches]
    rounds = [(launch, ms) for _ in range(_NUM_ROUNDS) for launch, ms in zip(launches, one_ms, strict=True)]
    return 1e3 * min(statistics.median(_replays(launch, ms)) for launch, ms in rounds)


def measure(run: Callable[[Any], Any], sets: Sequence[Any], *, is_capturable: bool = True) -> tuple[list[float], int, str]:
    """Time calls of `run` over the input sets in turn.

    Returns:
        Microseconds of one call, one figure a replay (or a call, where it is not captured); calls a figure; the timer's name.
    """
    run(sets[0])  # compiles, and fills what the variant keeps
    torch.cuda.synchronize()
    if not is_capturable:
        one_ms = _event_ms(lambda: run(sets[0]))
        times_ms = _replays(lambda: run(sets[0]), one_ms, at_least=3)
        return [1e3 * time_ms for time_ms in times_ms], 1, "events"
    for inputs in sets[1:]:
        run(inputs)
    graph = _capture(run, sets, 1)
    graph.replay()
    num_rounds = max(1, min(-(-256 // len(sets)), round(_REPLAY_MS / max(1e-3, _event_ms(graph.replay)))))
    if num_rounds > 1:
        graph = _capture(run, sets, num_rounds)
        graph.replay()
    num_calls = num_rounds * len(sets)
    return [1e3 * time_ms / num_calls for time_ms in _replays(graph.replay, _event_ms(graph.replay))], num_calls, "graph"


def _capture(run: Callable[[Any], Any], sets: Sequence[Any], num_rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for inputs in sets:
                run(inputs)
    return graph


def _replays(launch: Callable[[], Any], one_ms: float, at_least: int = 10) -> list[float]:
    num_replays = int(max(at_least, min(100, _TOTAL_MS / max(one_ms, 1e-3))))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_replays)]
    for start, end in marks:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def _event_ms(launch: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def summary(result: BenchResult) -> Mapping[str, int]:
    """Count rows by what became of them."""
    counts = {"ok": 0, "failed": 0, "unavailable": 0, "not run": 0}
    for row in result.rows:
        counts[row.status] += 1
    return counts
