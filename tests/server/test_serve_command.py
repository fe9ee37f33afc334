"""`ddtree-bench serve`: its options, and that asking for help costs no torch."""

import subprocess
import sys

import pytest

from ddtree_bench.cli.serve import command
from ddtree_bench.config import TreeSetting

OPTIONS = {
    *("--model", "--drafter", "--mode", "--block-size", "--depth", "--top-k", "--branching", "--node-budget"),
    *("--draft-temperature", "--tensor-parallel", "--device", "--dtype", "--host", "--port", "--max-running-requests"),
    *("--max-total-tokens", "--max-context", "--max-prefill-tokens", "--page-size", "--load-format", "--threads", "--seed"),
    *("--served-model-name", "--api-key", "--log-level"),
}


def test_the_options_are_these():
    assert {name for option in command.params for name in option.opts} == OPTIONS


def test_every_flag_of_a_tree_setting_is_an_option():
    full = TreeSetting(mode="tree", depth=3, branching=2, draft_temperature=0.6)
    for setting in (full, TreeSetting(mode="linear", depth=3), TreeSetting(mode="plain")):
        assert {word for word in setting.flags() if word.startswith("--")} <= OPTIONS


def test_help_imports_no_torch():
    code = (
        "import sys; from ddtree_bench.cli import root; "
        "root.main(['serve', '--help'], standalone_mode=False); "
        "assert not {'torch', 'aiohttp', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--node-budget" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-key", ""), "--api-key: must not be empty"),
        (("--host", ""), "host must be an address; given an empty one"),
        (("--served-model-name", ""), "--served-model-name must not be empty"),
        (("--tensor-parallel", "1000"), "num_attention_heads must divide by the tensor-parallel degree"),
        (("--threads", "100000"), "threads must be at most 1024"),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_what_nobody_means_is_refused_before_anything_starts(flags, words):
    done = subprocess.run([sys.executable, "-m", "ddtree_bench", "serve", *flags], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
