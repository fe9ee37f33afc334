"""The plot of `ddtree-bench kernels`: a line a case that was timed, alternatives beside the kernel in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddtree_bench.report.plots import kernels, style


def row(case: str, variant: str, median_us: float | None, *, is_ours: bool = True) -> dict[str, Any]:
    return {"op": "walk_tree", "case": case, "variant": variant, "is_ours": is_ours, "median_us": median_us, "floor_us": 0.5}


def test_one_line_a_timed_case(tmp_path: Path) -> None:
    rows = [
        row("small", "triton", None),
        row("wide", "triton", 4.0),
        row("wide", "triton-4-warps", 5.0),
        row("wide", "torch", 90.0, is_ours=False),
        row("failed", "triton", None),
        row("failed", "torch", 80.0, is_ours=False),
    ]
    data = kernels.data({"rows": rows})
    assert data.message is None
    assert [(line.name, line.median_us, dict(line.others)) for line in data.lines] == [("walk_tree  wide", 4.0, {"torch": 90.0})]
    style.render("Kernels", data, kernels.draw, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 0


def test_nothing_timed_is_told() -> None:
    data = kernels.data({"rows": [row("small", "triton", None)]})
    assert data.message is not None
    assert "GPU" in data.message
