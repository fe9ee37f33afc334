"""Opens the study's storage: an Optuna journal file in the results folder, or the database that the sweep file names.

A journal that a kill has torn is cut back to its last whole line before Optuna sees it; the torn file is kept beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree_bench.errors import DdtreeError, MissingPackageError

JOURNAL = "journal.log"


def open_storage(results_dir: Path, url: str | None) -> Any:
    """Return Optuna's storage: the journal of a results folder, or the database at `url`.

    The caller holds the lock of the results folder, so a journal lock that is found here belongs to a dead process.
    """
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url is not None:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
        except ImportError as error:
            raise MissingPackageError(str(error.name), "postgres", f"study.storage {url.split(':')[0]!r}") from error
        except SQLAlchemyError as error:  # the URL may hold a password: only its first word is told
            scheme, reason = url.partition(":")[0], str(error).splitlines()[0]
            raise DdtreeError(
                f"study.storage must be the URL of a database that can be reached; given {scheme!r}: {reason}; "
                "leave it out for a journal in the results folder"
            ) from error
    path = results_dir / JOURNAL
    repair_journal(path)
    for stale in results_dir.glob(f"{JOURNAL}.lock*"):
        stale.unlink()
    return JournalStorage(JournalFileBackend(str(path)))


def repair_journal(path: Path) -> int:
    """Cut a journal to its whole JSON lines; return how many bytes were cut. The torn file is kept as `….torn-N`."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    good = 0
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n") or not _is_entry(line):
            break
        good += len(line)
    if good == len(data):
        return 0
    number = len(list(path.parent.glob(f"{path.name}.torn-*"))) + 1
    path.with_name(f"{path.name}.torn-{number}").write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(good)
    return len(data) - good


def _is_entry(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
