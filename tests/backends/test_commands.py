"""The command lines of the backends, and what each refuses."""

from __future__ import annotations

import pytest

from ddtree_bench.backends import get_backend, refuse_ignored_knobs
from ddtree_bench.backends.leases import default_lease_dir
from ddtree_bench.config import ServerSpec, TreeSetting
from ddtree_bench.errors import MissingPackageError

CUDA = {"device": "cuda", "dtype": "bfloat16", "tensor_parallel": 8}


def test_embedded_passes_every_knob():
    server = ServerSpec(model="m", drafter="d", tensor_parallel=2, extra_args=("--threads", "1"))
    setting = TreeSetting(block_size=8, depth=5, top_k=4, branching=2, node_budget=20, draft_temperature=0.6)
    line = " ".join(get_backend("embedded").command(server, setting, port=0))
    assert line.startswith(
        "ddtree-bench serve --model m --drafter d --mode tree --block-size 8 --depth 5 --top-k 4 --node-budget 20 "
    )
    for part in ("--branching 2", "--draft-temperature 0.6", "--tensor-parallel 2", "--port 0", "--threads 1"):
        assert part in line


def test_embedded_plain_names_no_drafter():
    line = get_backend("embedded").command(ServerSpec(drafter="d"), TreeSetting(mode="plain"), port=1)
    assert "--drafter" not in line
    assert "--block-size" not in line


def test_embedded_flags_are_known_to_serve():
    from ddtree_bench.cli.serve import command

    known = {option for parameter in command.params for option in parameter.opts}
    line = get_backend("embedded").command(ServerSpec(drafter="d"), TreeSetting(depth=3, branching=2), port=0)
    assert {word for word in line if word.startswith("--")} <= known


def test_sglang_counts_the_root_of_a_chain():
    server = ServerSpec(backend="sglang", model="org/m", drafter="org/d", **CUDA)
    line = " ".join(get_backend("sglang").command(server, TreeSetting(mode="linear", block_size=16), port=7))
    assert "--speculative-algorithm DFLASH --speculative-draft-model-path org/d --speculative-num-draft-tokens 16" in line
    assert "--tp-size 8" in line
    plain = get_backend("sglang").command(server, TreeSetting(mode="plain"), port=7)
    assert not any("speculative" in word for word in plain)


@pytest.mark.parametrize(
    ("server", "setting", "words"),
    [
        ({**CUDA, "drafter": "d"}, TreeSetting(), "no plugin that registers it"),
        ({**CUDA}, TreeSetting(mode="linear"), "drafter must name"),
        ({**CUDA, "drafter": "d"}, TreeSetting(mode="linear", depth=4), "depth must be block_size - 1 = 15"),
        ({"drafter": "d"}, TreeSetting(mode="linear"), 'must be "cuda"'),
    ],
    ids=["tree", "no-drafter", "short-chain", "cpu"],
)
def test_sglang_refuses(server, setting, words):
    with pytest.raises(ValueError, match=words):
        get_backend("sglang").command(ServerSpec(backend="sglang", model="m", **server), setting, port=1)


def test_sglang_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    server = ServerSpec(backend="sglang", model="m", **CUDA)
    with pytest.raises(MissingPackageError, match=r"ddtree-bench\[sglang\]"):
        get_backend("sglang").start(server, TreeSetting(mode="plain"), tmp_path)


def test_ignored_knobs_are_refused():
    refuse_ignored_knobs(get_backend("embedded"), "tree", {"top_k", "branching"})
    with pytest.raises(ValueError, match=r"honours in mode 'linear' .*given top_k"):
        refuse_ignored_knobs(get_backend("embedded"), "linear", {"top_k", "block_size"})


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match="attach, embedded, sglang"):
        get_backend("vllm")


def test_lease_folder_is_private():
    assert default_lease_dir().stat().st_mode & 0o77 == 0
