"""The space: indices, canonical settings, the designed start, and the drafter's own block size."""

from __future__ import annotations

import json

import pytest
from mock_backend import make_spec

from ddtree_bench.config import SweepSpec, TreeSetting
from ddtree_bench.sweep import drafter
from ddtree_bench.sweep.space import MODE, Space, start_params


def space_of(mode="tree", **knobs) -> Space:
    return Space.of(SweepSpec.from_dict({"server": {"mode": mode}, "space": {"block_size": 16, **knobs}}))


def test_ranges_are_indices_into_ordered_values():
    space = space_of(node_budget=[31, 3, 15], depth=["none", 4])
    assert space.ranges() == {MODE: 2, "depth": 2, "node_budget": 3}
    assert space.knobs["node_budget"].values == (3, 15, 31)
    assert space.knobs["depth"].values == (4, None), "no cap is the largest"
    asked = space.asked({MODE: 1, "depth": 1, "node_budget": 2})
    assert asked == {
        "mode": "tree",
        "block_size": 16,
        "depth": None,
        "top_k": 8,
        "branching": None,
        "node_budget": 31,
        "draft_temperature": 1.0,
    }


def test_many_combinations_are_one_canonical_setting():
    space = space_of(node_budget=[1, 2], top_k=[2, 4, 8], branching=[1, 2, 8], draft_temperature=[0.6, 1.0])
    settings = space.settings()
    assert space.num_combinations() == 2 * 3 * 3 * 2 * 2
    trees = [setting for setting in settings if setting.mode == "tree"]
    assert TreeSetting(block_size=16, node_budget=1, depth=1, top_k=1).canonical() in trees
    assert len([s for s in trees if s.node_budget == 1]) == 1
    assert len([s for s in settings if s.mode == "linear"]) == 1
    assert all(setting == setting.canonical() for setting in settings)
    for setting, params in settings.items():
        assert space.setting(params) == setting


def test_linear_mode_searches_chains_only():
    space = space_of(mode="linear", block_size=[4, 8], depth=[2, "none"])
    assert space.ranges() == {"block_size": 2, "depth": 2}
    assert {s.label() for s in space.settings()} == {"linear b4 d2", "linear b4 d3", "linear b8 d2", "linear b8 d7"}


def test_knob_that_the_mode_ignores_is_refused():
    with pytest.raises(ValueError, match="given node_budget, top_k, which it ignores"):
        space_of(mode="linear", node_budget=[7, 15], top_k=4)


def test_one_setting_is_a_space():
    space = space_of(mode="linear")
    assert space.ranges() == {}
    assert space.setting({}) == TreeSetting(mode="linear", block_size=16).canonical()
    assert start_params(space) == [{}]


def test_plain_mode_is_refused():
    with pytest.raises(ValueError, match="tree or linear for a sweep"):
        space_of(mode="plain")


def test_a_bad_value_of_a_knob_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="block_size must be at least 2"):
        space_of(block_size=[1, 8])


def test_blocks_that_are_all_over_what_the_drafter_was_trained_for_are_refused():
    with pytest.raises(ValueError, match="block_size must hold a value of at most 16, what the drafter was trained for"):
        space_of(block_size=[32, 64])


def test_designed_start_is_chain_ladder_then_other_chains():
    space = space_of(block_size=[4, 8, 16], node_budget={"min": 3, "max": 255, "log": True}, top_k=[4, 8], depth=[3, "none"])
    labels = [space.setting(params).label() for params in start_params(space)]
    assert labels[0] == "linear b16 d15"
    assert labels[-2:] == ["linear b4 d3", "linear b8 d7"]
    ladder = [space.setting(params).node_budget for params in start_params(space)[1:-2]]
    assert ladder[0] == 3
    assert ladder[-1] == max(space.knobs["node_budget"].values)
    assert len(ladder) == 6


def test_designed_start_never_repeats():
    space = space_of(block_size=2, node_budget=[1, 7, 15])
    settings = [space.setting(params) for params in start_params(space)]
    assert len(settings) == len(set(settings))


def test_block_size_comes_from_the_drafters_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 10}))
    spec = SweepSpec.from_dict({"server": {"drafter": str(tmp_path)}, "space": {"node_budget": [3, 7]}})
    assert Space.of(spec).knobs["block_size"].values == (10,)


def test_bundled_drafter_is_found_by_the_models_name(tmp_path, monkeypatch):
    folder = tmp_path / "tiny-dense-dflash"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dflash_config": {"block_size": 16}}))
    monkeypatch.setattr(drafter, "BUNDLED", tmp_path)
    assert drafter.drafter_block_size(make_spec().server) == 16


def test_main_block_size_is_the_drafters_where_the_space_has_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 8}))
    spec = SweepSpec.from_dict({"server": {"drafter": str(tmp_path)}, "space": {"block_size": [4, 8, 16]}})
    assert Space.of(spec).main_block_size == 8


def test_unknown_block_size_says_what_to_do():
    spec = SweepSpec.from_dict({"server": {"model": "org/big", "drafter": "org/big-dflash"}, "space": {"node_budget": [3]}})
    with pytest.raises(ValueError, match=r"space\.block_size must be given"):
        Space.of(spec)
