"""Trial records for tests that launch nothing."""

from __future__ import annotations

from ddtree_bench.config import TreeSetting
from ddtree_bench.records import Failure, GateResult, TrialRecord


def asked_of(**knobs):
    base = {"mode": "tree", "block_size": 16, "depth": None, "top_k": 8, "branching": None, "node_budget": 15}
    return {**base, "draft_temperature": 1.0, **knobs}


def record(number, tok_s=100.0, acceptance=2.0, *, asked=None, constraints=None, gate=None, gates=None, **more):
    asked = asked or asked_of(node_budget=number + 1)
    gates = gates or (() if gate is None else (GateResult(name="losslessness", passed=gate),))
    metrics = {"output_tok_s": tok_s, "acceptance_length": acceptance, "ms_per_token": 8000.0 / tok_s}
    return TrialRecord(
        number=number,
        state="complete",
        asked=asked,
        effective=asked,
        label=TreeSetting(**asked).label(),
        metrics=metrics,
        gates=gates,
        constraints={"launch_ok": 0.0} if constraints is None else constraints,
        **more,
    )


def failed(number, kind="out_of_memory", *, is_own_fault=True, attempt=1, asked=None):
    asked = asked or asked_of(node_budget=number + 1)
    return TrialRecord(
        number=number,
        state="failed",
        asked=asked,
        effective=asked,
        label=TreeSetting(**asked).label(),
        failure=Failure(kind=kind, reason="it failed", is_own_fault=is_own_fault),
        constraints={"launch_ok": 1.0},
        attempt=attempt,
    )
