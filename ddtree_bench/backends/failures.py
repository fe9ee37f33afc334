"""Why a launch or a trial failed: one table of kinds, each the setting's own fault or the machine's.

A setting's own fault is told to the sampler and never tried again; the machine's fault is tried again, at most twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddtree_bench.errors import DdtreeError, ServerError, TrialError
from ddtree_bench.records import Failure

# kind → (is the setting's own fault, what it means)
KINDS = {
    "out_of_memory": (True, "the setting does not fit into memory"),
    "unsupported": (True, "the server refuses the setting"),
    "exited": (True, "the server ended by itself"),
    "crashed": (True, "the server was ended by a fault of its own (segmentation fault, abort)"),
    "setting_mismatch": (True, "the server runs another setting than was asked"),
    "losslessness": (True, "the output differs from plain decoding"),
    "min_acceptance": (True, "the acceptance length is under the gate"),
    "failed_requests": (True, "requests failed"),
    "no_tokens": (True, "no output tokens, or a metric that is not a number"),
    "impossible_rate": (True, "more tokens/s than can be true"),
    "bad_answer": (True, "the server answers what it must not"),
    "port_in_use": (False, "the port was taken by someone else"),
    "not_ready": (False, "not ready within the time that the harness allows"),
    "timeout": (False, "a time-out of the harness"),
    "killed": (False, "a process of the server was killed from outside"),
    "driver": (False, "the GPU driver or the interconnect failed"),
    "no_space": (False, "the disk is full"),
    "supervisor": (False, "the supervisor did not start"),
    "connect": (False, "the server cannot be reached"),
    "server": (False, "unclassified failure of the server"),
}

# first match wins, so that what a crash drags behind it does not hide its cause
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("out_of_memory", re.compile(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc", re.I)),
    ("port_in_use", re.compile(r"address already in use|EADDRINUSE", re.I)),
    ("no_space", re.compile(r"no space left on device", re.I)),
    ("driver", re.compile(r"unhandled system error|CUDA driver|device-side ECC|Xid|GPU is lost|NVLink.*error", re.I)),
    ("killed", re.compile(r"signal 9\b|SIGKILL|exit ?code[ :=]*-9\b", re.I)),
    ("unsupported", re.compile(r"NotImplementedError|not supported|unsupported|^error: ", re.I | re.M)),
)


def is_own_fault(kind: str) -> bool:
    """Return whether a kind of failure is the setting's own fault; unknown kinds are the machine's and so tried again."""
    if kind.startswith("http_"):
        return True
    return KINDS.get(kind, (False, ""))[0]


def kind_of_exit(status: int, lines: Sequence[str]) -> str:
    """Return the kind of an exit from its status (negative: a signal) and the log's last lines."""
    from_log = kind_of_log(lines)
    if from_log is not None:
        return from_log
    if status in (-9, -15, 137, 143):
        return "killed"
    return "crashed" if status < 0 else "exited"


def kind_of_log(lines: Sequence[str]) -> str | None:
    """Return the kind that a log's lines name, if any."""
    text = "\n".join(lines)
    return next((kind for kind, pattern in _PATTERNS if pattern.search(text)), None)


def failure_of(error: DdtreeError) -> Failure:
    """Return the record of an error that ended a trial."""
    kind = error.kind if isinstance(error, ServerError | TrialError) else "server"
    tail = error.log_tail if isinstance(error, ServerError) else ()
    reason = error.reason if isinstance(error, ServerError | TrialError) else str(error)
    return Failure(kind=kind, reason=reason, is_own_fault=is_own_fault(kind), log_tail=tuple(tail))
