"""Fixtures: a full study, and the thin ones that break plots."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from study_records import THIN, full_trials, study_of

from ddtree_bench.report.study import StudyResults


@pytest.fixture
def full_study() -> StudyResults:
    return study_of(full_trials(), name="full")


@pytest.fixture(params=list(THIN), ids=list(THIN))
def thin_study(request: pytest.FixtureRequest) -> StudyResults:
    return THIN[request.param]()
