"""The import table of the design, held over every import statement of the package, those inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ddtree_bench

ROOT = Path(ddtree_bench.__file__).parent
BASE = ("config", "records", "errors", "__version__")  # row 0: standard library only
GPU_ROWS = {"tree": 1, "kernels": 2, "models": 3, "engine": 4, "server": 5, "sglang_plugin": 5}
BENCH_ROWS = {
    "tree": 1,
    "backends": 3,
    "load": 3,
    "metrics": 3,
    "trial": 4,
    "sweep": 5,
    "compare": 5,
    "report": 5,
}
TOP = ("cli", "__main__")  # row 6: may reach everything, from inside functions
GPU_PACKAGES = {"torch", "triton", "transformers", "sglang"}
HEAVY = {
    *GPU_PACKAGES,
    "jinja2",
    "matplotlib",
    "optuna",
    "pandas",
    "prometheus_client",
    "psutil",
    "ray",
    "rich",
    "scipy",
    "zstandard",
}
MODULE_LEVEL = {  # what a package of the bench half may import when it is imported itself
    "cli": {"click"},
    "__main__": set(),
    "backends": {"aiohttp"},
    "load": {"aiohttp", "numpy"},
    "metrics": {"numpy"},
    "trial": {"aiohttp"},
    "sweep": {"numpy"},
    "compare": {"numpy"},
    "report": {"numpy", "aiohttp"},
    "tree": {"numpy"},
}


@dataclass(frozen=True)
class Import:
    """One imported module: where, what, and whether it happens when the file itself is imported."""

    file: str
    line: int
    package: str
    target: str
    is_module_level: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"

    @property
    def inner(self) -> str | None:
        """The package of ours that is imported."""
        parts = self.target.split(".")
        return parts[1] if parts[0] == "ddtree_bench" and len(parts) > 1 else None

    @property
    def outer(self) -> str | None:
        """The package of others that is imported."""
        top = self.target.split(".")[0]
        return None if top == "ddtree_bench" else top


def imports_of(file: Path) -> Iterator[Import]:
    parts = file.relative_to(ROOT).with_suffix("").parts
    package = "__init__" if parts == ("__init__",) else parts[0]

    def visit(node: ast.AST, is_module_level: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
                names = [alias.name for alias in child.names]
                targets = [f"ddtree_bench.{name}" for name in names] if child.module == "ddtree_bench" else [child.module]
            elif isinstance(child, ast.ImportFrom):
                targets = [f"ddtree_bench.relative.{child.module}"]
            for target in targets:
                yield Import(str(file.relative_to(ROOT)), child.lineno, package, target, is_module_level)
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, is_module_level and not is_function and not is_typing)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), True)


IMPORTS = [found for file in sorted(ROOT.rglob("*.py")) for found in imports_of(file)]


def refuse(bad: list[Import], rule: str) -> None:
    assert not bad, rule + ":\n" + "\n".join(str(one) for one in bad)


def test_every_package_has_its_row() -> None:
    packages = {p.name for p in ROOT.iterdir() if p.is_dir() and any(p.rglob("*.py"))} | {p.stem for p in ROOT.glob("*.py")}
    known = {*GPU_ROWS, *BENCH_ROWS, *TOP, *BASE, "__init__"}
    assert packages <= known, f"give a row in this file to {sorted(packages - known)}"


def test_imports_are_absolute() -> None:
    refuse([one for one in IMPORTS if one.inner == "relative"], "imports must name the package from its root")


def test_lowest_row_is_standard_library_only() -> None:
    import sys

    own = [one for one in IMPORTS if one.package in BASE]
    allowed = {*sys.stdlib_module_names, "zstandard"}  # records reads what a trial compressed, from inside a function
    bad = [one for one in own if one.outer and (one.outer not in allowed or (one.is_module_level and one.outer == "zstandard"))]
    refuse(bad, "row 0 must use the standard library only")
    refuse([one for one in own if one.inner and one.inner not in BASE], "row 0 must import row 0 only")


@pytest.mark.parametrize("rows", [GPU_ROWS, BENCH_ROWS], ids=["gpu half", "bench half"])
def test_no_row_imports_a_higher_one_or_the_other_half(rows: dict[str, int]) -> None:
    bad = []
    for one in IMPORTS:
        if one.package not in rows or one.inner is None or one.inner in BASE:
            continue
        if one.inner not in rows or rows[one.inner] > rows[one.package]:
            bad.append(one)
    refuse(bad, "imports must go to the same row or a lower one of the same half")


def test_packages_do_not_import_each_other_in_circles() -> None:
    edges: dict[str, set[str]] = {}
    for one in IMPORTS:
        if one.inner and one.inner != one.package and one.inner not in BASE:
            edges.setdefault(one.package, set()).add(one.inner)
    done: set[str] = set()

    def walk(package: str, path: tuple[str, ...]) -> None:
        assert package not in path, f"circle: {' → '.join([*path, package])}"
        if package not in done:
            for target in sorted(edges.get(package, ())):
                walk(target, (*path, package))
            done.add(package)

    for package in sorted(edges):
        walk(package, ())


def test_bench_half_never_imports_gpu_packages() -> None:
    bench = {*BENCH_ROWS, *TOP, *BASE}
    bad = [one for one in IMPORTS if one.package in bench and one.outer in GPU_PACKAGES]
    refuse(bad, "the bench half must reach torch, triton, transformers and sglang through a server or a process only")


def test_gpu_half_stays_free_of_the_bench_halfs_packages() -> None:
    foreign = {"matplotlib", "optuna", "pandas", "ray"}
    own = {"kernels", "models", "engine", "server", "sglang_plugin"}
    refuse([one for one in IMPORTS if one.package in own and one.outer in foreign], "the GPU half must not plot or search")
    refuse(
        [one for one in IMPORTS if one.outer == "sglang" and one.package != "sglang_plugin"],
        "only sglang_plugin may import sglang",
    )


def test_heavy_packages_are_imported_inside_functions() -> None:
    import sys

    bad = []
    for one in IMPORTS:
        known = {*sys.stdlib_module_names, *MODULE_LEVEL.get(one.package, ())}
        if one.package in MODULE_LEVEL and one.is_module_level and one.outer and one.outer not in known:
            bad.append(one)
    refuse(bad, "heavy packages must be imported inside the function that needs them")
    assert not HEAVY & set.union(*MODULE_LEVEL.values())


def test_command_line_reaches_the_rest_from_inside_functions() -> None:
    allowed = {*BASE, "cli"}
    bad = [one for one in IMPORTS if one.package == "cli" and one.is_module_level and one.inner and one.inner not in allowed]
    refuse(bad, "a command must import what it runs inside its body")


def test_scan_sees_what_it_must() -> None:
    """The rules above hold for something: imports were found in every row that exists."""
    assert len(IMPORTS) > 100
    assert {"cli", "trial", "metrics", "models"} <= {one.package for one in IMPORTS}
    assert any(not one.is_module_level for one in IMPORTS)
