"""Tiny checkpoints with random weights, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_support import write_pair


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `drafter`: 2 layers, width 32, 8 heads, vocabulary of 96."""
    return write_pair(tmp_path_factory.mktemp("pair"))
