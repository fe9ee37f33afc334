"""The `compare` command end to end against mock servers, what its arms mean, and the order of its blocks."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent / "sweep"))
sys.path.insert(0, str(Path(__file__).parent / "fakes"))
from mock_backend import MockBackend
from mock_server import running_mock

from ddtree_bench.cli.compare import command
from ddtree_bench.compare import runner, servers
from ddtree_bench.compare.arms import ArmSpec, arms_of, newest_best, read_context, resolve_arm
from ddtree_bench.compare.output import ARM_COLUMNS
from ddtree_bench.compare.runner import _certificate, block_order
from ddtree_bench.compare.servers import flat_config, safe_name, speculation_label
from ddtree_bench.config import ServerSpec, SweepSpec, TreeSetting
from ddtree_bench.errors import ServerError
from ddtree_bench.load.workloads import workload_of
from ddtree_bench.metrics.comparison import Arm, config_differences
from ddtree_bench.records import RequestRecord, machine_name
from ddtree_bench.trial.plain import PlainOutput

SMALL = ("load.num_prompts=6", "load.max_tokens=24", "load.num_warmups=0", "gates.drift=none")
BEST = """
[server]
model = "tiny-dense"
[load]
num_prompts = 6
[best]
mode = "tree"
node_budget = 31
[linear]
mode = "linear"
depth = 5
[tree]
mode = "tree"
node_budget = 31
[measured.best]
output_tok_s = 10.0
"""


def invoke(*arguments: str, overrides: tuple[str, ...] = SMALL):
    sets = [word for override in overrides for word in ("--set", override)]
    return CliRunner().invoke(command, [*arguments, *sets, "--json"], catch_exceptions=False)


@pytest.fixture
def mock_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MockBackend:
    backend = MockBackend(lease_dir=tmp_path / "leases", options=["--first-token-ms", "1", "--ms-per-round", "1"])
    monkeypatch.setattr(servers, "get_backend", lambda name: backend)
    return backend


def test_compare_measures_plain_beside_both_arms(tmp_path: Path, mock_backend: MockBackend) -> None:
    done = invoke("linear", "vs", "tree", "--results", str(tmp_path), "--blocks", "2")
    result = json.loads(done.output.splitlines()[-1])
    assert done.exit_code == 0
    assert sorted(setting.mode for setting in mock_backend.launches) == ["linear", "plain", "tree"]
    assert [arm["name"] for arm in result["arms"]] == ["plain", "linear", "tree"]
    assert [(p["baseline"], p["arm"]) for p in result["pairs"]] == [("linear", "tree"), ("plain", "linear"), ("plain", "tree")]
    assert {c["num_exact"] for c in result["certificates"]} == {6}
    assert result["source"] == "bundled defaults"
    assert "acceptance length" in " ".join(ARM_COLUMNS), "never a bare acceptance: with the bonus or without it differs by 1"
    folder = Path(result["folder"])
    assert folder.name == "compare-linear-vs-tree"
    written = {file.name for file in folder.iterdir()}
    assert {"comparison.json", "comparison.md", "comparison.png", "requests-tree-1.jsonl.zst"} <= written
    assert all(arm["num_requests"] == 12 for arm in result["arms"])
    assert list((tmp_path / "leases").glob("*.lease")) == []


def test_restarted_servers_are_started_for_each_block(tmp_path: Path, mock_backend: MockBackend) -> None:
    invoke("plain", "tree", "--results", str(tmp_path), "--blocks", "2", "--restart-servers")
    assert Counter(setting.mode for setting in mock_backend.launches) == {"plain": 2, "tree": 2}


def test_start_that_fails_keeps_the_earlier_comparison(tmp_path: Path, mock_backend: MockBackend) -> None:
    folder = Path(
        json.loads(invoke("plain", "tree", "--results", str(tmp_path), "--blocks", "1").output.splitlines()[-1])["folder"]
    )
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    mock_backend.options_of = lambda setting: ["--no-such-option"]
    with pytest.raises(ServerError, match="arm "):
        invoke("plain", "tree", "--results", str(tmp_path), "--blocks", "1")
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    assert any(name.startswith("requests-") for name in before)


@pytest.mark.parametrize("override", ["study.trials=3", "space.node_budget=7", "lod.num_prompts=3"])
def test_override_that_a_comparison_does_not_read_is_refused(tmp_path: Path, override: str) -> None:
    done = invoke("linear", "tree", "--results", str(tmp_path), overrides=(override,))
    assert done.exit_code == 2
    assert "[server], [load] or [gates]" in " ".join(done.output.split())


def test_lossy_arm_has_no_speedup(tmp_path: Path, mock_backend: MockBackend) -> None:
    mock_backend.options_of = lambda setting: ["--bends-text-every", "2"] if setting.mode == "tree" else []
    done = invoke("linear", "tree", "--results", str(tmp_path), "--blocks", "1")
    result = json.loads(done.output.splitlines()[-1])
    speedups = {pair["arm"] + "/" + pair["baseline"]: pair["speedup"] for pair in result["pairs"]}
    assert speedups["tree/linear"] is None
    assert speedups["tree/plain"] is None
    assert speedups["linear/plain"] is not None
    assert "same output as plain" in result["pairs"][0]["sentence"]


def test_running_servers_are_compared_by_url(tmp_path: Path) -> None:
    linear, tree = TreeSetting(mode="linear", depth=7), TreeSetting()
    with (
        running_mock(setting=linear, acceptance_length=2.0) as first,
        running_mock(setting=tree, acceptance_length=4.0) as second,
    ):
        done = invoke(first.url, second.url, "--results", str(tmp_path), "--blocks", "2")
    result = json.loads(done.output.splitlines()[-1])
    assert [arm["label"] for arm in result["arms"]] == [linear.canonical().label(), tree.canonical().label()]
    assert result["ranking"][0] == second.url.removeprefix("http://")


def test_failed_requests_leave_the_speedup_empty(tmp_path: Path) -> None:
    with running_mock() as first, running_mock(fault="in_band_error", fault_every=4) as second:
        done = invoke(first.url, second.url, "--results", str(tmp_path), "--blocks", "1")
    result = json.loads(done.output.splitlines()[-1])
    assert result["pairs"][0]["speedup"] is None
    assert "requests failed (server)" in done.output


def test_newest_sweep_gives_the_settings(tmp_path: Path) -> None:
    for name, age in (("old", 100), ("new", 10)):
        folder = tmp_path / "machine" / name
        folder.mkdir(parents=True)
        (folder / "best.toml").write_text(BEST.replace("31", "7") if name == "old" else BEST)
        stamp = 1_700_000_000 - age
        os.utime(folder / "best.toml", (stamp, stamp))
    assert newest_best(tmp_path) == tmp_path / "machine" / "new" / "best.toml"
    context = read_context(None, tmp_path)
    arms, plain = arms_of("linear", "tree", context)
    assert [arm.setting for arm in arms] == [TreeSetting(mode="linear", depth=5), TreeSetting(node_budget=31)]
    assert "newest sweep" in arms[1].source
    assert plain is not None
    assert context.study_dir == tmp_path / "machine" / "new"
    assert context.spec.load.num_prompts == 6


def test_results_of_another_machine_give_no_settings(tmp_path: Path) -> None:
    here = machine_name()
    made = {"other": ("far-away-x8", "2031-01-01"), "here": (here, "2030-01-02"), "older": (here, "2030-01-01")}
    for name, (machine, when) in made.items():
        folder = tmp_path / "machine" / name
        folder.mkdir(parents=True)
        (folder / "best.toml").write_text(f'{BEST}\n[provenance]\nmachine = "{machine}"\nwhen_utc = "{when}"\n')
    assert newest_best(tmp_path) == tmp_path / "machine" / "here" / "best.toml"
    assert newest_best(tmp_path / "machine" / "other") == tmp_path / "machine" / "other" / "best.toml", "it was named"


def test_study_of_the_config_gives_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "machine" / "mine"
    folder.mkdir(parents=True)
    (folder / "best.toml").write_text(BEST)
    (folder / "study.toml").write_text('[study]\nname = "mine"\n')
    sweep = tmp_path / "mine.toml"
    sweep.write_text('[study]\nname = "mine"\n[load]\nnum_prompts = 3\n')
    context = read_context(sweep, tmp_path / "results")
    assert context.settings["tree"].node_budget == 31
    assert context.spec.load.num_prompts == 3
    sweep.write_text('[study]\nname = "other"\n')
    assert read_context(sweep, tmp_path / "results").settings == {}


def test_bundled_defaults_without_a_sweep(tmp_path: Path) -> None:
    arms, plain = arms_of("linear", "tree", read_context(None, tmp_path))
    assert [arm.setting for arm in arms] == [TreeSetting(mode="linear"), TreeSetting()]
    assert plain is not None
    assert "bundled defaults" in arms[0].source


def test_toml_arm_is_its_best_setting(tmp_path: Path) -> None:
    file = tmp_path / "best.toml"
    file.write_text(BEST)
    arm = resolve_arm(str(file), read_context(None, tmp_path / "none"))
    assert (arm.name, arm.setting) == ("best", TreeSetting(node_budget=31))


def test_same_arm_twice_gets_two_names(tmp_path: Path) -> None:
    arms, _ = arms_of("tree", "tree", read_context(None, tmp_path))
    assert [arm.name for arm in arms] == ["tree-A", "tree-B"]


@pytest.mark.parametrize("given", ["fast", "missing", "ftp://host"])
def test_unknown_arm_is_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plain, linear, tree, a \.toml file or an http:// URL"):
        resolve_arm(given, read_context(None, tmp_path))


def test_open_sweep_file_is_no_arm(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text("[space]\nnode_budget = [3, 7]\n")
    with pytest.raises(ValueError, match="node_budget"):
        resolve_arm(str(file), read_context(None, tmp_path / "none"))


@pytest.mark.parametrize("arms", [["tree"], ["a", "b", "c"], ["a", "vs", "b", "c"]])
def test_two_arms_are_needed(arms: list[str]) -> None:
    done = CliRunner().invoke(command, arms)
    assert done.exit_code == 2
    assert "needs two arms" in done.output


def test_blocks_are_shuffled_by_seed() -> None:
    names = ["plain", "linear", "tree"]
    order = block_order(names, 12, seed=3)
    assert order == block_order(names, 12, seed=3)
    assert all(sorted(block) == sorted(names) for block in order)
    assert len({block[0] for block in order}) == 3


def test_file_names_are_safe() -> None:
    assert safe_name("http://127.0.0.1:80/v1") == "127.0.0.1-80-v1"


EAGLE = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}


@pytest.mark.parametrize(
    ("told", "difference"),
    [
        ({"disable_cuda_graph": True}, "disable_cuda_graph: True / False"),
        ({"disable_overlap_schedule": True}, "disable_overlap_schedule: True / False"),
        ({"attention_backend": "triton"}, "attention_backend: 'triton' / 'fa3'"),
        ({"ddtree": {"is_graphed": False}}, "is_graphed: False / None"),
    ],
    ids=["graphs", "overlap", "attention", "our graphs"],
)
def test_graph_overlap_and_kernels_that_a_server_tells_are_compared(told: dict, difference: str) -> None:
    common = {"disable_cuda_graph": False, "disable_overlap_schedule": False, "attention_backend": "fa3"}
    arm = ArmSpec(name="a", server=ServerSpec(), setting=TreeSetting(), source="")
    one, other = (
        Arm(name=name, label="", blocks=[], config=flat_config(arm, info))
        for name, info in (("a", {**common, **told}), ("b", common))
    )
    assert config_differences(one, other) == [difference]


def test_a_server_of_someone_else_is_named_with_its_draft_tree() -> None:
    assert speculation_label(EAGLE) == "EAGLE3, 5 steps, top-k 4, verify width 16"
    assert speculation_label({"speculative_algorithm": None}) is None
    assert speculation_label({}) is None


def test_every_difference_is_put_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 40 of 40, with the load's own limits: what is left undecided withholds the verdict."""
    spec = SweepSpec.from_dict({"server": {"dtype": "bfloat16"}, "load": {"num_prompts": 40, "ignore_eos": True}})
    first, second = (ArmSpec(name=n, server=spec.server, setting=TreeSetting(mode=n), source="") for n in ("plain", "tree"))
    ids = [prompt.prompt_id for prompt in workload_of(spec.load).prompts]
    folded = {
        name: Arm(name=name, label=name, blocks=[[RequestRecord(request_id=i, prompt_id=i, text=text) for i in ids]])
        for name, text in (("plain", "a b"), ("tree", "a c"))
    }
    asked = []

    def collect(url, model, prompts, **options):
        asked.extend(prompts)
        assert options["extra"] == {"ignore_eos": True}
        top = ({"a": -0.1, "z": -4.0}, {" b": -0.75, " c": -0.76})
        logits = {"top_logits": (20.0, 20.0)} if len(asked) <= 40 else {}
        return [PlainOutput(prompt_id=p.prompt_id, text="a b", tokens=("a", " b"), top=top, **logits) for p in prompts]

    monkeypatch.setattr(runner, "collect_plain", collect)
    monkeypatch.setattr(servers.Servers, "get", lambda *_: SimpleNamespace(url="http://there", model="m"))
    with servers.Servers(Path("unused"), keep_up=True) as none_started:
        certificate = _certificate(first, second, folded, none_started, spec)
        assumed = _certificate(first, second, folded, none_started, spec)
    assert (certificate.num_numeric_ties, certificate.num_undecided, certificate.note) == (40, 0, "")
    assert sorted(prompt.prompt_id for prompt in asked[:40]) == sorted(ids)
    assert assumed.gate().detail.endswith("tie limit assumes logits of at most 16")


def test_difference_from_a_foreign_reference_is_no_proven_fault() -> None:
    """Nobody vouches for the arithmetic of a server that runs already, float32 or not."""
    spec = SweepSpec.from_dict({"load": {"endpoint": "chat"}})
    foreign = ArmSpec(name="there", server=ServerSpec(backend="attach", url="http://there"), setting=None, source="")
    own = ArmSpec(name="plain", server=ServerSpec(), setting=TreeSetting(mode="plain"), source="")
    texts = {"there": "a", "plain": "b"}
    folded = {
        name: Arm(name=name, label=name, blocks=[[RequestRecord(request_id="r", prompt_id="p", text=text)]])
        for name, text in texts.items()
    }
    with servers.Servers(Path("unused"), keep_up=True) as none_started:
        certificate = _certificate(foreign, own, folded, none_started, spec)
    assert certificate is not None
    assert (certificate.num_real_differences, certificate.num_undecided) == (0, 1)
