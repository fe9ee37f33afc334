"""Tiny checkpoints with random weights, written once a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures that tests recorded with `record_property`, passed or not."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    recorded = [report for report in reports if getattr(report, "user_properties", None)]
    if recorded:
        terminalreporter.section("figures of the engine's tests")
    for report in recorded:
        figures = ", ".join(f"{name}: {value}" for name, value in report.user_properties)
        terminalreporter.line(f"{report.nodeid}: {figures}")
