"""The prompts that ship: cut from packages that are never trained on, in three classes that differ in acceptance.

docstring: a signature and its docstring, the body is asked for. tests: the first half of a test function, after the
one before it. prose: the beginning of a long docstring, the rest is asked for.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ddtree_bench.models.training.corpus import HELD_OUT, SKIPPED_PARTS, packages, readable_text

CLASSES = ("docstring", "tests", "prose")
MIN_CHARS, MAX_CHARS = 220, 900
MAX_SHARE_OF_PACKAGE = 0.45
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_prompts(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yield signature + docstring of functions with a body worth asking for."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and ast.get_docstring(node) and len(node.body) >= 3:
            yield "".join(lines[node.lineno - 1 : node.body[0].end_lineno])


def tests_prompts(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yield a test function's first half together with the function before it."""
    for owner in ast.walk(tree):
        if not isinstance(owner, (ast.Module, ast.ClassDef)):
            continue
        functions = [node for node in owner.body if isinstance(node, FUNCTIONS)]
        for before, node in itertools.pairwise(functions):
            num_lines = (node.end_lineno or node.lineno) - node.lineno
            if node.name.startswith("test") and num_lines >= 4:
                middle = node.lineno + num_lines // 2
                yield "".join(lines[before.lineno - 1 : middle])


def prose_prompts(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yield the first part of long docstrings, cut after a line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and len(ast.get_docstring(node) or "") > 500:
            statement = node.body[0]
            text = "".join(lines[statement.lineno - 1 : statement.end_lineno])
            words = sum(character.isalpha() or character == " " for character in text) / len(text)
            if words > 0.8 and ">>>" not in text:
                keep = text[: min(MAX_CHARS, int(0.6 * len(text)))]
                yield keep[: keep.rfind("\n") + 1]


CUTTERS = {"docstring": docstring_prompts, "tests": tests_prompts, "prose": prose_prompts}


def is_test_file(name: str) -> bool:
    """Tell whether a file holds tests, by its name."""
    return "/tests/" in name or "/testing/" in name or Path(name).name.startswith("test_")


def candidates() -> Iterator[dict[str, str]]:
    """Yield every prompt that could be cut from the held-out packages installed here."""
    for package, version, licence, files in packages():
        if package not in HELD_OUT:
            continue
        for name, path in files:
            text = None if SKIPPED_PARTS.search(name) else readable_text(path)
            if text is None:
                continue
            tree, lines = ast.parse(text), text.splitlines(keepends=True)
            for kind in ("tests",) if is_test_file(name) else ("docstring", "prose"):
                for prompt in CUTTERS[kind](tree, lines):
                    if MIN_CHARS <= len(prompt) <= MAX_CHARS and prompt.isascii():
                        source = f"{package} {version} ({licence}) {name}"
                        yield {"class": kind, "package": package, "prompt": prompt, "source": source}


def tidy(text: str) -> str:
    """Return the text without common indentation and without its last line break.

    A byte-level tokenizer joins a line break with the indentation after it: a prompt that ends in one would ask for
    a continuation that no training text has.
    """
    return textwrap.dedent(text).rstrip()


def cut_prompts(path: Path, num_prompts: int) -> None:
    """Write the prompts, the classes in equal parts, at most two of one file and no package taking over."""
    chosen: list[dict[str, str]] = []
    ranked = sorted(candidates(), key=lambda row: hashlib.sha256(row["prompt"].encode()).hexdigest())
    per_class = -(-num_prompts // len(CLASSES))
    for kind in CLASSES:
        by_package: dict[str, int] = defaultdict(int)
        by_file: dict[str, int] = defaultdict(int)
        taken: dict[str, dict[str, str]] = {}
        of_kind = [row for row in ranked if row["class"] == kind]
        for cap in (MAX_SHARE_OF_PACKAGE * per_class, per_class):
            for row in of_kind:
                is_free = by_package[row["package"]] < cap and by_file[row["source"]] < 2
                if len(taken) < per_class and is_free and row["prompt"] not in taken:
                    taken[row["prompt"]] = row
                    by_package[row["package"]] += 1
                    by_file[row["source"]] += 1
        chosen += taken.values()
        print(f"prompts: {kind}: {len(taken)} of {len(of_kind)} candidates, {dict(by_package)}", flush=True)
    counts: dict[str, int] = defaultdict(int)
    with path.open("w") as handle:
        for row in chosen:
            number = counts[row["class"]]
            counts[row["class"]] += 1
            record = {
                "prompt_id": f"{row['class']}-{number:03d}",
                "class": row["class"],
                "prompt": tidy(row["prompt"]),
                "source": row["source"],
            }
            handle.write(json.dumps(record) + "\n")


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Return the rows of a prompt file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
