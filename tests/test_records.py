"""Provenance: whose commit is told."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import ddtree_bench
from ddtree_bench import records


def test_commit_of_somebody_elses_checkout_is_not_told(tmp_path: Path, monkeypatch) -> None:
    """An installed package may lie inside another project, whose commit says nothing about it."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    copy = tmp_path / "site-packages" / "ddtree_bench" / "records.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(Path(ddtree_bench.__file__).with_name("records.py"), copy)
    monkeypatch.setattr(records, "__file__", str(copy))
    monkeypatch.setattr(records, "COMMIT_FILE", copy.with_name("_commit.json"))
    assert records.git_state() == {"commit": None, "is_dirty": None}
    records.write_json(records.COMMIT_FILE, {"commit": "abc", "is_dirty": False})
    assert records.git_state() == {"commit": "abc", "is_dirty": False}


def test_checkout_wins_over_a_commit_file_that_was_left(tmp_path: Path, monkeypatch) -> None:
    left = tmp_path / "_commit.json"
    records.write_json(left, {"commit": "stale", "is_dirty": False})
    before = records.git_state()
    monkeypatch.setattr(records, "COMMIT_FILE", left)
    is_checkout = (Path(ddtree_bench.__file__).parents[1] / ".git").exists()
    assert records.git_state() == (before if is_checkout else {"commit": "stale", "is_dirty": False})


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\udcff"], ids=["empty", "torn", "list", "no-fields", "not-utf8"])
def test_broken_record_of_a_trial_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "trial-000" / "trial.json"
    file.parent.mkdir()
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"trial-000/trial\.json must hold the record of one trial; .*; move its folder away"):
        records.read_trials(tmp_path)
