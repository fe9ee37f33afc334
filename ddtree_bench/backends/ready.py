"""When a server is ready, and whether one is gone: the checks around a launch that are the same for every backend."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ddtree_bench.backends import http
from ddtree_bench.backends.base import RunningServer, StopReport, exit_error
from ddtree_bench.backends.failures import kind_of_log
from ddtree_bench.backends.launch import Launched, LogReader, log_tail
from ddtree_bench.errors import ServerError

_URL_LINE = re.compile(r"^(https?://\S+)$")
_FATAL_IN_LOG = ("out_of_memory", "port_in_use", "no_space")  # seen in the log, no wait for the exit is needed
_POLL_S = 0.1
GPU_TOLERANCE_MIB = 256


def wait_ready(launched: Launched, *, url: str | None, timeout_s: float) -> tuple[str, str]:
    """Wait until a launched server serves; return its URL (read from its log where None) and its model id.

    Raises:
        ServerError: it ended, its log names a fatal cause, or the time is over (kind "not_ready").
    """
    deadline = time.monotonic() + timeout_s
    log = LogReader(launched.log_path)
    url = _wait_url(launched, log, deadline) if url is None else url
    while True:
        _check(launched, log, deadline, f"GET {url}/health must answer 200")
        try:
            http.get(f"{url}/health", timeout_s=5)
            break
        except ServerError:
            time.sleep(_POLL_S)
    try:
        return url, prove_serving(url, timeout_s=max(deadline - time.monotonic(), 5))
    except ServerError as error:
        if error.kind == "connect":
            _raise_if_ending(launched)
        raise


def _raise_if_ending(launched: Launched) -> None:
    """Tell a server that ends now, rather than the connection that it broke."""
    for _ in range(20):
        if launched.poll() is not None:
            raise exit_error(launched, "the server must answer one generation")
        time.sleep(_POLL_S)


def _wait_url(launched: Launched, log: LogReader, deadline: float) -> str:
    while True:
        lines = log.new_lines()
        for line in lines:
            if found := _URL_LINE.match(line):
                return found.group(1).rstrip("/")
        _check_lines(launched, lines)
        _check(launched, log, deadline, "the server must print its URL")
        time.sleep(_POLL_S)


def _check(launched: Launched, log: LogReader, deadline: float, must: str) -> None:
    if launched.poll() is not None:
        raise exit_error(launched, f"{must}; the server must start")
    _check_lines(launched, log.new_lines())
    if time.monotonic() > deadline:
        raise ServerError(f"{must}; not within ready_timeout_s", kind="not_ready", log_tail=log_tail(launched.log_path))


def _check_lines(launched: Launched, lines: list[str]) -> None:
    kind = kind_of_log(lines)
    if kind in _FATAL_IN_LOG:
        raise ServerError(f"the server must start; its log says {kind}", kind=kind, log_tail=log_tail(launched.log_path))


def prove_serving(url: str, *, timeout_s: float) -> str:
    """Ask for the model's id and one real generation; return the id.

    Raises:
        ServerError: kind "bad_answer" where an answer has no model or no text.
    """
    model = model_id(url)
    body = {"model": model, "prompt": "def main", "max_tokens": 4, "temperature": 0}
    answer = http.post(f"{url}/v1/completions", body, timeout_s=timeout_s)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not choices or "text" not in choices[0]:
        raise ServerError(f"POST {url}/v1/completions must answer a text; given {str(answer)[:200]}", kind="bad_answer")
    return model


def model_id(url: str) -> str:
    """Return the id of the first model that the server lists."""
    answer = http.get(f"{url}/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise ServerError(f"GET {url}/v1/models must list a model; given {str(answer)[:200]}", kind="bad_answer") from error


def server_info(url: str) -> Mapping[str, Any]:
    """Return GET /server_info; empty where a server has none."""
    try:
        info = http.get(f"{url}/server_info")
    except ServerError:
        return {}
    return info if isinstance(info, dict) else {}


def stop_launched(running: RunningServer, *, memory_wait_s: float = 30.0) -> StopReport:
    """Stop a launched server; tell whether its group is empty, its port free and its GPU memory back."""
    launched = running.launched
    if launched is None:
        return StopReport(detail="not started by us, so not stopped")
    launched.stop()
    left = gpu_memory_left(running.gpu_used_mib, wait_s=memory_wait_s)
    port_free = is_port_free(running.url)
    empty = launched.is_empty()
    detail = [] if empty else [f"processes of group {launched.pgid} are left"]
    detail += [] if port_free else [f"{running.url} still accepts connections"]
    detail += [f"{left} MiB of GPU memory did not come back"] if left else []
    return StopReport(
        is_group_empty=empty,
        is_port_free=port_free,
        is_gpu_memory_back=None if left is None else left == 0,
        was_killed=launched.was_killed,
        detail="; ".join(detail),
    )


def is_port_free(url: str) -> bool:
    """Return whether nobody accepts connections at the URL."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "127.0.0.1", address.port or 80), timeout=1).close()
    except OSError:
        return True
    return False


def free_port() -> int:
    """Return a port that is free now; another process may take it before a server does (kind "port_in_use")."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gpu_used_mib() -> tuple[int, ...] | None:
    """Return the used memory of each NVIDIA GPU in MiB; None where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return tuple(int(word) for word in words) if done.returncode == 0 and words and all(w.isdigit() for w in words) else None


def gpu_memory_left(before: tuple[int, ...] | None, *, wait_s: float) -> int | None:
    """Wait for the GPU memory to come back; return what is missing in MiB on the worst GPU, 0 if all is back."""
    if before is None:
        return None
    deadline = time.monotonic() + wait_s
    while True:
        now = gpu_used_mib()
        if now is None or len(now) != len(before):
            return None
        missing = max(after - earlier for after, earlier in zip(now, before, strict=True))
        if missing <= GPU_TOLERANCE_MIB:
            return 0
        if time.monotonic() > deadline:
            return missing
        time.sleep(0.5)
