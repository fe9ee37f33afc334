"""Specs travel through TOML unchanged, and the sweep files that ship can be planned."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from mock_backend import make_spec

from ddtree_bench.backends import get_backend
from ddtree_bench.config import SweepSpec
from ddtree_bench.sweep.plan import make_plan
from ddtree_bench.sweep.toml import to_toml

SWEEPS = sorted((Path(__file__).parents[2] / "sweeps").glob("*.toml"))


def test_spec_round_trip(tmp_path):
    spec = make_spec(
        server={"env": {"A_B": 'say "hi"\t\\ ü 𝛼 \x7f'}, "extra_args": ["--x", "a b"]},
        load={"request_rate": 2.5, "dataset_name": "jsonl", "dataset_path": "/a/b c.jsonl"},
        space={"depth": [3, "none"], "draft_temperature": [0.6, 1.0]},
        gates={"drift": "none", "min_acceptance": 1.5},
        constraints={"ttft_p50_ms": 800},
    )
    file = tmp_path / "spec.toml"
    file.write_text(to_toml(spec.to_dict(), comment="two\nlines"))
    assert SweepSpec.from_toml(file) == spec


def test_values_that_toml_lacks():
    assert tomllib.loads(to_toml({"a.b": {"x": None, "y z": float("inf"), "t": True}})) == {
        "a": {"b": {"y z": float("inf"), "t": True}}
    }
    with pytest.raises(TypeError, match="a TOML value must be"):
        to_toml({"a": {"x": object()}})


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_shipped_sweep_can_be_planned(file, tmp_path):
    spec = SweepSpec.from_toml(file)
    assert spec.study.name == file.stem, "a sweep's results are named after its file"
    plan = make_plan(spec, tmp_path / "r", get_backend(spec.server.backend))
    num_plain_again = -(-spec.study.trials // 10)
    assert plan.num_launches == spec.study.trials + 1 + num_plain_again, "plain decoding runs again every ten trials"
    modes = [setting.mode for setting in plan.start]
    assert modes[0] == "linear"
    assert "tree" in modes
    assert "resolved spec" in plan.text()


def test_plan_of_a_small_space_counts_no_more_launches_than_settings(tmp_path):
    spec = make_spec(study={"trials": 50}, space={"block_size": 8, "node_budget": [1, 2], "top_k": 4})
    plan = make_plan(spec, tmp_path, get_backend("embedded"))
    assert plan.num_legal == 3
    assert plan.num_launches == 3 + 2, "plain decoding before and after"
