"""Puts the fakes on the path and gives a small data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """Twelve prompts of three classes that differ in number."""
    path = tmp_path / "prompts.jsonl"
    classes = ["code"] * 6 + ["prose"] * 4 + ["test"] * 2
    rows = [
        {"prompt_id": f"p{i:02d}", "class": name, "prompt": f"prompt number {i}", "source": "here"}
        for i, name in enumerate(classes)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
