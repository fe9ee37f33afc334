"""The project's own errors. Bad values raise ValueError, bad types TypeError; these are for what fails outside the caller."""

from __future__ import annotations

from collections.abc import Iterable


class DdtreeError(Exception):
    """Base of the project's own errors; the command line prints its text without a traceback and exits with 1."""


class ServerError(DdtreeError):
    """A server did not start, died, or answered what it must not; carries the last lines of its log.

    Args:
        reason: one line: what must hold, what happened.
        kind: short machine-readable class, e.g. "exited", "not_ready", "port_in_use", "out_of_memory".
        log_tail: last lines of the server's log, oldest first.
    """

    def __init__(self, reason: str, *, kind: str = "server", log_tail: Iterable[str] = ()) -> None:
        self.reason = reason
        self.kind = kind
        self.log_tail = tuple(log_tail)
        tail = "".join(f"\n    {line}" for line in self.log_tail)
        super().__init__(reason + (f"\n  last lines of the server's log:{tail}" if tail else ""))


class TrialError(DdtreeError):
    """A trial ran but its result must not be used, e.g. a failed gate; `kind` names which."""

    def __init__(self, reason: str, *, kind: str) -> None:
        self.reason = reason
        self.kind = kind
        super().__init__(reason)


class RanksDisagreeError(DdtreeError):
    """Tensor-parallel ranks hold different trees or took different walks; names the round."""


class MissingPackageError(DdtreeError):
    """An optional package is needed now and is not installed; names the extra that brings it."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed: pip install 'ddtree-bench[{extra}]'"
        )


def unknown_name(what: str, given: object, known: Iterable[str]) -> ValueError:
    """Return the error for an unknown name, which lists the known ones."""
    return ValueError(f"{what} must be one of {', '.join(sorted(known))}; given {given!r}")
