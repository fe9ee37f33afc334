"""Classes of failure: by exit status and by what the log says."""

from __future__ import annotations

import pytest

from ddtree_bench.backends.failures import KINDS, failure_of, is_own_fault, kind_of_exit, kind_of_log
from ddtree_bench.errors import RanksDisagreeError, ServerError, TrialError


@pytest.mark.parametrize(
    ("status", "lines", "kind"),
    [
        (
            1,
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "worker died with signal 9"],
            "out_of_memory",
        ),
        (1, ["OSError: [Errno 98] error while attempting to bind: address already in use"], "port_in_use"),
        (1, ["OSError: [Errno 28] No space left on device"], "no_space"),
        (1, ["rank 1 was ended by signal 9"], "killed"),
        (1, ["error: top_k must be at least 1; given 0"], "unsupported"),
        (1, ["NotImplementedError: trees with sliding windows"], "unsupported"),
        (1, ["Traceback", "AssertionError: acc"], "exited"),
        (0, [], "exited"),
        (-9, [], "killed"),
        (137, [], "killed"),
        (-15, [], "killed"),
        (-11, [], "crashed"),
        (-6, ["Fatal Python error: Aborted"], "crashed"),
    ],
)
def test_kind_of_exit(status, lines, kind):
    assert kind_of_exit(status, lines) == kind
    assert kind in KINDS


def test_ordinary_log_lines_are_no_failure():
    lines = ["INFO loading weights", "INFO ready, memory 3.2 GiB of 139", "http://127.0.0.1:4000", "signal 90 received"]
    assert kind_of_log(lines) is None


@pytest.mark.parametrize("kind", ["out_of_memory", "unsupported", "losslessness", "failed_requests", "exited", "http_500"])
def test_the_settings_own_fault(kind):
    assert is_own_fault(kind)


@pytest.mark.parametrize("kind", ["port_in_use", "not_ready", "timeout", "killed", "driver", "something_new"])
def test_the_machines_fault(kind):
    assert not is_own_fault(kind)


def test_failure_keeps_reason_and_log():
    failure = failure_of(ServerError("it must start", kind="out_of_memory", log_tail=["a", "b"]))
    assert (failure.kind, failure.reason, failure.is_own_fault, failure.log_tail) == (
        "out_of_memory",
        "it must start",
        True,
        ("a", "b"),
    )
    assert failure_of(TrialError("gate", kind="losslessness")).is_own_fault
    assert failure_of(RanksDisagreeError("round 3")).reason == "round 3"
