"""Engine settings refuse what cannot run, and threads never outnumber cores."""

from __future__ import annotations

import os

import pytest

from ddtree_bench.engine.settings import EngineSettings, thread_environment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "device must be one of cpu, cuda"),
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32"),
        ({"load_format": "gguf"}, "load_format must be one of auto, dummy"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"max_total_tokens": 0}, "max_total_tokens must be at least 1"),
        ({"threads": 100_000}, "threads must be at most 1024"),
        ({"seed": -1}, "seed must be between 0 and"),
        ({"seed": 2**63}, "seed must be between 0 and"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings(**changes)


@pytest.mark.parametrize("num_cores", [1, 2, 16, 64])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 8])
def test_threads_fit_the_cores(num_cores: int, tensor_parallel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    settings = EngineSettings(tensor_parallel=tensor_parallel)
    assert settings.threads_per_rank >= 1
    assert settings.threads_per_rank * tensor_parallel <= max(num_cores, tensor_parallel)
    assert thread_environment(settings)["OMP_WAIT_POLICY"] == "PASSIVE"


def test_threads_that_were_asked_for_are_used() -> None:
    settings = EngineSettings(threads=3)
    assert settings.threads_per_rank == 3
    assert thread_environment(settings)["OMP_NUM_THREADS"] == "3"
