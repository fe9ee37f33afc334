"""Readiness and stop, against the mock server: ready, never ready, dead at the start, attached."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sweep"))
from mock_backend import MockBackend

from ddtree_bench.backends import get_backend, ready
from ddtree_bench.config import ServerSpec, TreeSetting
from ddtree_bench.errors import ServerError

SERVER = ServerSpec(ready_timeout_s=60.0)


def start(tmp_path, *options, server=SERVER):
    return MockBackend(lease_dir=tmp_path / "leases", options=options).start(server, TreeSetting(), tmp_path)


def test_start_is_ready_and_stop_is_clean(tmp_path):
    backend = MockBackend(lease_dir=tmp_path / "leases", options=("--model", "m"))
    running = backend.start(SERVER, TreeSetting(), tmp_path)
    assert running.model == "m"
    assert running.url.startswith("http://127.0.0.1:")
    running.check()
    report = backend.stop(running)
    assert report.is_clean
    assert (report.is_group_empty, report.is_port_free) == (True, True)
    with pytest.raises(ServerError, match="must be answered"):
        ready.model_id(running.url)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("RuntimeError: CUDA out of memory", "out_of_memory"), ("address already in use", "port_in_use"), ("boom", "exited")],
)
def test_server_that_ends_at_the_start_is_seen_at_once_with_its_log(tmp_path, text, kind):
    with pytest.raises(ServerError) as error:
        start(tmp_path, "--exit-after", "0", "--exit-code", "3", "--log-text", text)
    assert error.value.kind == kind
    assert text in error.value.log_tail
    assert list((tmp_path / "leases").iterdir()) == []


def test_never_ready_is_the_harness_time_out(tmp_path):
    with pytest.raises(ServerError) as error:
        start(tmp_path, "--start-delay-s", "inf", server=dataclasses.replace(SERVER, ready_timeout_s=1.5))
    assert error.value.kind == "not_ready"
    assert list((tmp_path / "leases").iterdir()) == []


def test_a_server_without_a_real_answer_is_not_ready(tmp_path):
    with pytest.raises(ServerError) as error:
        start(tmp_path, "--fault", "http_503")
    assert error.value.kind == "http_503"


def test_attach_starts_and_stops_nothing(tmp_path):
    running = start(tmp_path)
    try:
        attach = get_backend("attach")
        attached = attach.start(ServerSpec(backend="attach", url=running.url + "/v1/"), TreeSetting(), tmp_path)
        assert (attached.url, attached.pid) == (running.url, None)
        assert attach.stop(attached).is_clean
        running.check()
        assert ready.model_id(running.url) == "mock"
    finally:
        running.launched.stop()


def test_attach_to_nobody_says_so(tmp_path):
    server = ServerSpec(backend="attach", url=f"http://127.0.0.1:{ready.free_port()}")
    with pytest.raises(ServerError, match="must be answered"):
        get_backend("attach").start(server, TreeSetting(), tmp_path)


@pytest.mark.parametrize(
    ("readings", "left"),
    [([(100, 100)], 0), ([(9000, 100), (300, 100)], 0), ([(9000, 100)], 8900)],
    ids=["back", "back-later", "missing"],
)
def test_gpu_memory_must_come_back(monkeypatch, readings, left):
    told = iter(readings)
    last = readings[-1]
    monkeypatch.setattr(ready, "gpu_used_mib", lambda: next(told, last))
    monkeypatch.setattr(ready.time, "sleep", lambda seconds: None)
    assert ready.gpu_memory_left((100, 100), wait_s=0.05) == left


def test_gpu_memory_is_unknown_without_a_gpu():
    assert ready.gpu_memory_left(None, wait_s=0) is None
