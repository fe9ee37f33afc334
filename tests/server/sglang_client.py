"""SGLang's own benchmark client without SGLang's GPU dependencies, in a folder beside the environment.

    python tests/server/sglang_client.py      installs it (from the package index, about 300 MB) and prints the folder

`sglang.bench_serving` is run unmodified. Its import chain reaches modules of the serving engine; what those import is
installed here without dependencies. torchvision (of which no build fits every torch) and datasets are stubs: the client uses
them for images and for downloads alone. torch, numpy, aiohttp, tqdm and the like come from the environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "sglang==0.5.17",
    "transformers==5.12.1",
    "tokenizers==0.22.2",
    "huggingface-hub>=1.5,<2",
    "xgrammar==0.2.1",
    "apache-tvm-ffi==0.1.11",
    *("certifi", "charset-normalizer", "compressed-tensors", "dill", "einops", "fastapi", "gguf", "httpcore", "httpx"),
    *("ipython", "loguru", "msgspec", "orjson", "partial-json-parser", "pillow", "pybase64", "pydantic", "pyzmq", "regex"),
    *("requests", "sentencepiece", "setproctitle", "starlette", "traitlets", "urllib3", "uvicorn"),
)
TORCHVISION = """
class AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Absent(metaclass=AnyAttribute):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision is a stub in this test")


__version__ = "0.24.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent
"""
SUBMODULE = "from torchvision import Absent, __getattr__\n"
DATASETS = 'def load_dataset(*args, **kwargs):\n    raise NotImplementedError("datasets is a stub in this test")\n'
STUBS = {
    "torchvision/__init__.py": TORCHVISION,
    "torchvision/io.py": SUBMODULE,
    "torchvision/transforms/__init__.py": SUBMODULE,
    "torchvision/transforms/functional.py": SUBMODULE,
    "torchvision/transforms/v2/__init__.py": SUBMODULE,
    "torchvision/transforms/v2/functional.py": SUBMODULE,
    "datasets.py": DATASETS,
}


class NotInstallable(Exception):
    """The package index has no such packages for this Python, or cannot be reached."""


def default_folder() -> Path:
    """Return where the client is kept between runs; another list of packages or another Python has another folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    key = hashlib.sha256(repr((PACKAGES, STUBS, sys.version_info[:2])).encode()).hexdigest()[:12]
    return cache / "ddtree-bench-tests" / f"sglang-client-{key}"


def install(folder: Path | None = None) -> Path:
    """Return the folder that holds the client, installing it where it is missing.

    Raises:
        NotInstallable: pip failed; carries its last line.
    """
    folder = folder or default_folder()
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished), *PACKAGES]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            raise NotInstallable((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        for name, text in STUBS.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / name).write_text(text)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def bench_serving(folder: Path, arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m sglang.bench_serving` with arguments."""
    env = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "sglang.bench_serving", *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)


if __name__ == "__main__":
    print(install())
