"""The bench: every operation takes part, a wrong answer is told, nothing is timed without a GPU."""

from dataclasses import dataclass

import pytest
import torch

from ddtree_bench.kernels import bench
from ddtree_bench.kernels.bench import Cost, OpBench, Unavailable, Variant, find_benches, run_bench, summary


@dataclass(frozen=True)
class DoubleCase:
    name: str
    size: int


def make_inputs(case, seed, device):
    return torch.randn(case.size, generator=torch.Generator(device).manual_seed(seed), device=device)


def check(case, inputs, run):
    assert torch.equal(run(inputs), inputs * 2), "not the double"


def bench_of(run, name="ours", op="double"):
    return OpBench(
        op=op,
        test_cases=(DoubleCase("one", 1), DoubleCase("odd", 33)),
        bench_cases=(DoubleCase("large", 1 << 20),),
        make_inputs=make_inputs,
        check=check,
        variants=lambda case, device: [Variant(name="torch", run=lambda x: x + x, is_ours=False), Variant(name=name, run=run)],
        cost=lambda case: Cost(num_bytes=8 * case.size, num_flops=case.size),
    )


def refuse(inputs):
    raise Unavailable("not today")


def test_every_operation_takes_part():
    names = [op_bench.op for op_bench in find_benches()]
    assert {"argmax_merge", "commit_kv", "topk_logprobs", "walk_tree", "write_kv"} <= set(names)
    assert [op_bench.op for op_bench in find_benches(["walk_tree"])] == ["walk_tree"]
    with pytest.raises(ValueError, match=r"op must be one of .*walk_tree.*; given nothing"):
        find_benches(["nothing"])


def test_cases_have_names_and_costs():
    for op_bench in find_benches():
        for cases in (op_bench.test_cases, op_bench.bench_cases):
            names = [case.name for case in cases]
            assert names
            assert len(names) == len(set(names))
        assert all(op_bench.cost(case).num_bytes > 0 for case in op_bench.bench_cases)


def test_right_wrong_and_unavailable_answers():
    benches = [bench_of(lambda x: x * 2), bench_of(lambda x: x * 3, "wrong"), bench_of(refuse, "away")]
    result = run_bench(benches, case_filter="o")
    rows = [(row.variant, row.case, row.status, row.is_checked) for row in result.rows if row.case in ("one", "odd")]
    assert rows == [
        ("ours", "one", "ok", True),
        ("ours", "odd", "ok", True),
        ("wrong", "one", "failed", False),
        ("wrong", "odd", "failed", False),
        ("away", "one", "unavailable", False),
        ("away", "odd", "unavailable", False),
    ]
    assert [row.reason.split("\n")[0] for row in result.failures] == ["AssertionError: not the double"] * 2
    assert summary(result) == {"ok": 2, "failed": 2, "unavailable": 2, "not run": 0}


def test_nothing_runs_after_the_context_died(monkeypatch):
    """An illegal access ends the process's GPU context: what was found stays, the rest says that it was not run."""
    num_calls = []

    def crash(x):
        num_calls.append(1)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(bench, "_is_context_dead", lambda device: True)
    told = []
    benches = [bench_of(lambda x: x * 2, op="first"), bench_of(crash, op="second"), bench_of(lambda x: x * 2, op="third")]
    result = run_bench(benches, case_filter="o", report=told.append)
    small = [row for row in result.rows if row.case in ("one", "odd")]
    assert [(row.op, row.case, row.status) for row in small] == [
        ("first", "one", "ok"),
        ("first", "odd", "ok"),
        ("second", "one", "failed"),
        ("second", "odd", "not run"),
        ("third", "one", "not run"),
        ("third", "odd", "not run"),
    ]
    assert {row.reason for row in small[3:]} == {"the GPU context died in ours"}
    assert told == result.rows
    assert len(num_calls) == 1
    assert [row.op for row in result.failures if row.case in ("one", "odd")] == ["second", "second", "third", "third"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_timed_without_a_gpu():
    result = run_bench([bench_of(lambda x: x * 2)])
    assert result.ceilings is None
    assert all(row.median_us is None for row in result.rows)


@pytest.mark.gpu
def test_times_with_shares_and_ratios():
    result = run_bench([bench_of(lambda x: x * 2)], case_filter="large")
    rows = {row.variant: row for row in result.rows}
    assert rows["ours"].is_checked
    assert rows["ours"].timer == "graph"
    assert rows["ours"].p20_us <= rows["ours"].median_us <= rows["ours"].p80_us
    assert 0 < rows["ours"].copy_share < 3
