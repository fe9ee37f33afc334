"""What every test shares: `--record FILE` writes each test's outcome with provenance, as evidence that can be committed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ddtree_bench.records import provenance, write_json

OUTCOMES = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, default=None, help="write the outcome of each test to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}
    config.pluginmanager.register(Recorder(config), "outcome-recorder")


class Recorder:
    """Keeps the outcome of each test: a failure in setup or teardown is a failure of the test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcomes = self.config.stash[OUTCOMES]
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = self.config.getoption("--record")
        if path is not None and not hasattr(session.config, "workerinput"):
            outcomes = self.config.stash[OUTCOMES]
            write_json(
                path, {"provenance": provenance(), "totals": Counter(outcomes.values()), "tests": dict(sorted(outcomes.items()))}
            )
