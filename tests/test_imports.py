"""A fresh interpreter without the optional and heavy packages imports the command line and the bench half."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree_bench

ROOT = Path(ddtree_bench.__file__).parent
BLOCKED = [
    "jinja2",
    "matplotlib",
    "mpmath",
    "optuna",
    "pandas",
    "prometheus_client",
    "psutil",
    "psycopg",
    "ray",
    "rich",
    "scipy",
    "sglang",
    "sqlalchemy",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvloop",
    "zstandard",
]
BLOCK = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {set(BLOCKED)!r}:
            raise ImportError(f"{{name}} is blocked in this test")
sys.meta_path.insert(0, Block())
"""


def modules_of(package: str) -> list[str]:
    names = []
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = ("ddtree_bench", *file.relative_to(ROOT).with_suffix("").parts)
        names.append(".".join(parts).removesuffix(".__init__"))
    return names


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["cli", "trial", "load", "metrics", "backends", "compare", "report", "sweep"])
def test_imports_without_optional_packages(package: str) -> None:
    names = modules_of(package)
    assert names
    run(BLOCK + f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n")


def test_tree_needs_numpy_alone() -> None:
    run(BLOCK + f"import importlib\nfor name in {modules_of('tree')!r}:\n    importlib.import_module(name)\n")


def test_help_brings_in_click_and_nothing_of_weight() -> None:
    code = (
        "import sys, json\nfrom ddtree_bench.cli import root\n"
        "root.main(['--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    out = run(code)
    loaded = set(json.loads(out.splitlines()[-1]))
    assert "Usage" in out
    assert "click" in loaded
    assert loaded.isdisjoint({*BLOCKED, "numpy", "aiohttp"})


@pytest.mark.parametrize("command", ["serve", "load", "sweep", "compare", "kernels", "report", "view", "doctor", "mock"])
def test_help_of_a_command_needs_no_optional_package(command: str) -> None:
    out = run(BLOCK + f"from ddtree_bench.cli import root\nroot.main([{command!r}, '--help'], standalone_mode=False)\n")
    assert "Usage" in out


def test_importing_does_nothing() -> None:
    """No device query, no thread, no file: importing every module of the bench half leaves the process as it was."""
    names = [name for package in ("trial", "load", "metrics", "backends", "compare", "report") for name in modules_of(package)]
    code = (
        "import importlib, os, threading, logging\nbefore = dict(os.environ)\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "assert threading.active_count() == 1\nassert dict(os.environ) == before\nassert logging.getLogger().handlers == []\n"
    )
    run(code)
