"""Sweep files as a hurried person writes them: every slip is an error that names the key and what was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_bench.config import SweepSpec, apply_override

SLIPS = {
    "server.extra_args=[1]": "server.extra_args must hold strings; given [1]",
    'server.env={"A=B"="x"}': "server.env must hold names without '='",
    'server.env={A="\\u0000"}': "no NUL character",
    'study.objectives="output_tok_s"': "study.objectives must be of type list",
    "study.name=" + "a" * 101: "study.name must be at most 100 characters",
    'constraints.tpot_p50_ms="fast"': "constraints.tpot_p50_ms must be of type float; given 'fast'",
    'space.node_budget={min="a", max=3}': "space.node_budget.min must be a finite number; given 'a'",
    "space.draft_temperature={min=0.1, max=inf}": "space.draft_temperature.max must be a finite number; given inf",
    "space.node_budget={min=1, max=1000000000}": "space.node_budget must give at most 10000 values",
    "space.draft_temperature={min=0.1, max=1, step=1e-12}": "space.draft_temperature must give at most 10000 values",
}


@pytest.mark.parametrize("override", SLIPS, ids=[slip[:32] for slip in SLIPS])
def test_slip_is_named(tmp_path: Path, override: str) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text("", encoding="utf-8")
    with pytest.raises((ValueError, TypeError)) as error:
        SweepSpec.from_toml(file, [override])
    assert SLIPS[override] in str(error.value)


def test_override_of_something_that_is_no_table_is_refused() -> None:
    with pytest.raises(TypeError, match=r"\[study\] must be a table; given 5"):
        apply_override({"study": 5}, "study.trials=3")


def test_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    for content in (b"[study", b"\xff\xfe[study]"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"sweep\.toml must be valid TOML in UTF-8"):
            SweepSpec.from_toml(file)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_bytes(b'\xef\xbb\xbf[study]\nname = "a"\n')
    assert SweepSpec.from_toml(file).study.name == "a"
