"""The records that the halves of the project and its commands hand to each other (DESIGN section 4.4).

Owns: the record of a request, the record of a trial, provenance, and how they reach the disk. Everything shown to a person
is a pure fold over these. Standard library only. Unknown is None; zero means measured zero.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_bench import __version__

BASELINE_DIR = "baseline-plain"  # beside trial-NNN: plain decoding, measured in the same session


def tokens_of_counts(num_verify_steps: int | None, num_accepted: int | None, num_cut: int | None) -> int | None:
    """Return the output tokens that a request's counts add up to, None if one is unknown; the 1 is from prefill."""
    if num_verify_steps is None or num_accepted is None or num_cut is None:
        return None
    return 1 + num_accepted + num_verify_steps - num_cut


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it; times in seconds on one monotonic clock of the client.

    `chunks` holds [arrival time, tokens or None] of every content chunk. `num_accepted` is counted as walked, before stop and
    length cut; `num_cut` holds what was cut, so that output_tokens = 1 + num_accepted + num_verify_steps - num_cut.
    `warnings` holds what the server told and the client could not use, one sentence each.
    """

    request_id: str
    prompt_id: str
    class_: str | None = None
    planned_s: float | None = None
    sent_s: float | None = None
    first_token_s: float | None = None
    first_answer_s: float | None = None
    last_token_s: float | None = None
    done_s: float | None = None
    chunks: Sequence[Sequence[float | int | None]] = ()
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    token_source: str | None = None
    outcome: str = "ok"
    error_kind: str | None = None
    error_message: str | None = None
    num_verify_steps: int | None = None
    num_accepted: int | None = None
    num_draft_tokens: int | None = None
    num_cut: int | None = None
    accepted_histogram: Sequence[int] | None = None
    warnings: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.outcome not in ("ok", "error"):
            raise ValueError(f"outcome must be ok or error; given {self.outcome!r}")
        if (self.outcome == "error") != (self.error_kind is not None):
            raise ValueError(f"error_kind must be set for an error and only then; given {self.outcome!r}, {self.error_kind!r}")
        histogram, steps, accepted = self.accepted_histogram, self.num_verify_steps, self.num_accepted
        if histogram is not None and steps is not None and sum(histogram) != steps:
            raise ValueError(f"accepted_histogram must add up to num_verify_steps {steps}; given {list(histogram)}")
        if histogram is not None and accepted is not None and sum(i * n for i, n in enumerate(histogram)) != accepted:
            raise ValueError(f"accepted_histogram must weigh num_accepted {accepted}; given {list(histogram)}")
        told = tokens_of_counts(steps, accepted, self.num_cut)
        if self.outcome == "ok" and self.output_tokens is not None and told not in (None, self.output_tokens):
            raise ValueError(f"output_tokens must be 1 + accepted + verify steps - cut = {told}; given {self.output_tokens}")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; the field `class` has its plain name there."""
        row = dataclasses.asdict(self)
        row["class"] = row.pop("class_")
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> RequestRecord:
        """Read the JSON form; unknown fields are ignored so that older readers take newer files."""
        names = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in row.items() if key in names}
        values["class_"] = row.get("class")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One gate: passed True, False, or None where it could not be checked (then `detail` says why)."""

    name: str
    passed: bool | None
    detail: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no result. `is_own_fault`: the setting's fault (True) or the machine's (False)."""

    kind: str
    reason: str
    is_own_fault: bool
    log_tail: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial: what was asked, what ran, what came out. `trial.json` holds exactly this.

    `state` is complete or failed. `metrics` has at least output_tok_s, acceptance_length, ms_per_token, num_requests,
    num_failed_requests, output_tokens, window_s, num_verify_steps, num_accepted, num_draft_tokens, depth_survival (a list),
    ttft_{mean,p50,p90,p99}_ms, tpot_{mean,p50,p90,p99}_ms, e2e_{…}_ms; None where unknown.
    `timings_s` holds launch, gate, warm, load, stop, total. `constraints` are met where at most 0. `stop` says what was left
    after the stop. `attempt` counts launches of this trial: those that failed by the machine's fault are tried again.
    """

    number: int
    state: str
    asked: Mapping[str, Any]
    effective: Mapping[str, Any]
    label: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    gates: Sequence[GateResult] = ()
    failure: Failure | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict)
    command: Sequence[str] = ()
    server_info: Mapping[str, Any] = field(default_factory=dict)
    constraints: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    stop: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state not in ("complete", "failed"):
            raise ValueError(f"state must be complete or failed; given {self.state!r}")
        if (self.state == "failed") != (self.failure is not None):
            raise ValueError(f"a failed trial must hold its failure and only it may; given {self.state!r}, {self.failure!r}")

    @property
    def failed_gates(self) -> list[str]:
        """Names of the gates that the trial failed; one that could not be checked is none of them."""
        return [gate.name for gate in self.gates if gate.passed is False]

    @property
    def counts(self) -> bool:
        """Whether its numbers may be shown beside others: complete, with no gate failed."""
        return self.state == "complete" and not self.failed_gates

    @property
    def is_feasible(self) -> bool:
        """Whether it may be a result: it counts and meets every constraint."""
        return self.counts and all(value <= 0 for value in self.constraints.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> TrialRecord:
        """Read the JSON form; unknown fields are ignored.

        Raises:
            ValueError: a state that is none. TypeError: a field is missing or of a wrong type.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in row.items() if key in names}
        for name in ("asked", "effective", "metrics", "timings_s", "server_info", "constraints", "stop", "provenance"):
            if not isinstance(values.get(name, {}), Mapping):
                raise TypeError(f"{name} must be an object; given {values[name]!r}")
        values["gates"] = tuple(GateResult(**gate) for gate in row.get("gates", ()))
        failure = row.get("failure")
        values["failure"] = None if failure is None else Failure(**failure)
        return cls(**values)


def read_trials(results_dir: Path) -> list[TrialRecord]:
    """Read every `trial-NNN/trial.json` under a study's results, by trial number."""
    files = sorted(Path(results_dir).glob("trial-*/trial.json"))
    return sorted((read_trial(file) for file in files), key=lambda trial: trial.number)


def read_trial(file: Path) -> TrialRecord:
    """Read one trial.json.

    Raises:
        ValueError: it holds no trial; names it and says what to do.
    """
    try:
        return TrialRecord.from_dict(read_json(file))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} must hold the record of one trial; {error}; move its folder away, and a sweep measures it again"
        ) from error


def read_baseline(results_dir: Path) -> TrialRecord | None:
    """Read the plain arm of a study, which is no trial of its space; None before it was measured."""
    file = Path(results_dir) / BASELINE_DIR / "trial.json"
    return read_trial(file) if file.exists() else None


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a kill at any instant leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (same folder, flushed to disk, then renamed)."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Read one JSON file.

    Raises:
        ValueError: the file is not JSON; names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} must hold JSON; {error}") from error


class RequestLog:
    """Appends request records to a JSONL file as they end, one line each, flushed; a context manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: RequestRecord) -> None:
        self._file.write(json.dumps(record.to_dict(), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_requests(path: Path) -> Iterator[RequestRecord]:
    """Read a requests.jsonl or its .zst; a last line torn by a kill is left out.

    Raises:
        ValueError: a broken line that is not the last; names file and line.
    """
    lines = _text_of(path).split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}:{number} must hold one JSON object; {error}") from error
        yield RequestRecord.from_dict(row)


def _text_of(path: Path) -> str:
    if path.suffix != ".zst":
        return path.read_text(encoding="utf-8")
    import zstandard

    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read().decode("utf-8")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One figure that an issue's bar asked for, and whether it holds; `source` is the committed file that it was read from."""

    bar: str
    what: str
    value: float | int | str | None
    unit: str
    limit: str
    holds: bool
    machine: str
    command: str
    source: str


def write_bars(path: Path, bars: Iterable[Bar]) -> None:
    """Merge bars into `results/bars/<name>.json`, a list; a bar of the same name and text is replaced."""
    rows = {(row["bar"], row["what"]): row for row in (read_json(path) if path.exists() else [])}
    rows.update({(bar.bar, bar.what): dataclasses.asdict(bar) for bar in bars})
    write_json(path, [rows[key] for key in sorted(rows)])


def machine_name() -> str:
    """Return a short name of this machine for `results/<machine>/`: GPU model and count, or CPU and cores."""
    gpus = gpu_inventory()
    if gpus:
        model = gpus[0]["name"].lower().replace("nvidia", "").strip().replace(" ", "-")
        return f"{model}-x{len(gpus)}"
    return f"cpu-{platform.machine()}-{os.cpu_count()}c"


def gpu_inventory() -> list[dict[str, str]]:
    """Return name, driver and memory of each NVIDIA GPU as nvidia-smi tells them; empty where there is none."""
    query = "name,driver_version,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [{"name": row[0], "driver": row[1], "memory_mib": row[2]} for row in rows]


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Return where, when and with what a result was made: machine, GPU, driver, versions, commit, dirty, command."""
    from importlib import metadata

    versions: dict[str, str | None] = {"ddtree-bench": __version__}
    for package in ("torch", "triton", "numpy", "optuna", "aiohttp"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "when_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_name(),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "gpus": gpu_inventory(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
        **git_state(),
        "command": command_line() if command is None else list(command),
    }


def command_line() -> list[str]:
    """Return how this process was started, without the folders of this machine in front of its program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [Path(sys.argv[0]).name, *sys.argv[1:]]
    return ["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]


def cpu_model() -> str | None:
    """Return the processor's name as the kernel tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else None


COMMIT_FILE = Path(__file__).resolve().with_name("_commit.json")  # written by `make commit-file` for a copy without git


def git_state() -> dict[str, Any]:
    """Return commit and is_dirty of the checkout that tracks this package, else of its commit file, else None.

    A package that is installed inside somebody else's checkout is not tracked by it, so that its commit is not told.
    """
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        kept = read_json(COMMIT_FILE) if COMMIT_FILE.exists() else {}
        return {key: kept.get(key) for key in ("commit", "is_dirty")}
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "is_dirty": None if status is None else status != ""}
