"""What `doctor` looks at on this machine; a check returns lines and changes nothing. torch is asked in its own process."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

OK, WARN, STOP = "ok", "warn", "stop"
GIB = 1024**3
NEEDED = ("aiohttp", "click", "jinja2", "matplotlib", "numpy", "optuna", "pandas", "prometheus-client", "rich", "safetensors")
NEEDED_BY_SERVE = ("tokenizers", "torch", "triton")
OPTIONAL = {"sglang": "the SGLang backend", "ray": "trials on several nodes", "psycopg": "a study in PostgreSQL"}
ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda, "is_available": cuda,
                  "num_gpus": torch.cuda.device_count() if cuda else 0,
                  "capability": list(torch.cuda.get_device_capability(0)) if cuda else None}))
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the report: what was looked at, ok / warn / stop, what was found, and what to do where it is not ok."""

    name: str
    status: str
    found: str
    do: str = ""


def run(command: Sequence[str], timeout_s: float = 30.0) -> str | None:
    """Return what a command prints; None where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def system() -> list[Line]:
    """Check the operating system, Python and the processor."""
    is_linux = platform.system() == "Linux"
    found = f"{platform.system()} {platform.release()}"
    lines = [Line(name="system", status=OK if is_linux else STOP, found=found, do="" if is_linux else "run on Linux")]
    lines.append(Line(name="python", status=OK, found=f"{platform.python_version()} at {sys.prefix}"))
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    status, do = (OK, "") if cores >= 2 else (WARN, "give it 2 cores: client and server disturb each other on one")
    lines.append(Line(name="cores", status=status, found=f"{cores} of {os.cpu_count()} usable", do=do))
    busy = os.getloadavg()[0]
    is_busy = busy > 0.5 * cores
    do = "let other work end first: a busy machine makes numbers drift" if is_busy else ""
    lines.append(Line(name="load", status=WARN if is_busy else OK, found=f"{busy:.2f} over the last minute", do=do))
    return lines


def memory() -> list[Line]:
    """Check free memory, shared memory and disk."""
    import psutil

    free = psutil.virtual_memory()
    limit = _cgroup_limit()
    total = min(free.total, limit) if limit else free.total
    status, do = (OK, "") if free.available > 4 * GIB else (WARN, "free some: a server and its load want about 4 GiB")
    lines = [Line(name="memory", status=status, found=f"{free.available / GIB:.1f} of {total / GIB:.1f} GiB free", do=do)]
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).free
        status, do = (OK, "") if size >= GIB else (WARN, "enlarge /dev/shm (docker: --shm-size=16g): NCCL needs it between GPUs")
        lines.append(Line(name="shared memory", status=status, found=f"{size / GIB:.1f} GiB free in /dev/shm", do=do))
    disk = shutil.disk_usage(Path.cwd()).free
    status, do = (OK, "") if disk >= 2 * GIB else (WARN, "free some: records and logs of a sweep grow")
    if disk < 0.2 * GIB:
        status, do = STOP, "free some: records could not be written"
    lines.append(Line(name="disk", status=status, found=f"{disk / GIB:.1f} GiB free here", do=do))
    return lines


def _cgroup_limit() -> int | None:
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text(encoding="utf-8").strip() if file.exists() else "max"
    return int(text) if text.isdigit() else None


def limits() -> list[Line]:
    """Check open files, ports and thread settings."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status, do = (OK, "") if soft >= 1024 else (WARN, f"ulimit -n {min(hard, 65536)}: every connection is an open file")
    if soft < 128:
        status = STOP
    lines = [Line(name="open files", status=status, found=f"{soft} (hard limit {hard})", do=do)]
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        lines.append(Line(name="ports", status=OK, found="a free port on 127.0.0.1 can be bound"))
    except OSError as error:
        lines.append(Line(name="ports", status=STOP, found=str(error), do="allow binding to 127.0.0.1"))
    lines.append(_threads())
    return lines


def _threads() -> Line:
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")
    found = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "not set; servers choose"
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > (os.cpu_count() or 1):
        return Line(name="threads", status=WARN, found=found, do="unset OMP_NUM_THREADS or lower it to the cores there are")
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        return Line(name="threads", status=WARN, found=found, do="set OMP_WAIT_POLICY=PASSIVE: spinning threads slow each other")
    return Line(name="threads", status=OK, found=found)


def packages() -> list[Line]:
    """Check the packages that commands import, without importing them."""
    lines = []
    for names, purpose in ((NEEDED, "every command"), (NEEDED_BY_SERVE, "`serve` and the embedded backend")):
        versions = {name: version_of(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            found = f"missing: {', '.join(missing)}"
            lines.append(Line(name="packages", status=STOP, found=found, do=f"pip install {' '.join(missing)}  (for {purpose})"))
        else:
            shown = ", ".join(f"{name} {version}" for name, version in versions.items())
            lines.append(Line(name="packages", status=OK, found=shown))
    for name, purpose in OPTIONAL.items():
        version = version_of(name)
        found = f"{name} {version}" if version else f"{name} is not installed: only {purpose} needs it"
        lines.append(Line(name="optional", status=OK, found=found))
    return lines


def version_of(package: str) -> str | None:
    """Return a package's version; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpus(device: str | None) -> list[Line]:
    """Check GPUs, what torch sees of them, their links, and who else uses them."""
    from ddtree_bench.records import gpu_inventory

    cards = gpu_inventory()
    told = run([sys.executable, "-c", ASK_TORCH], timeout_s=120) if version_of("torch") else None
    torch = json.loads(told.strip().splitlines()[-1]) if told else None
    if not cards:
        needed = device == "cuda"
        do = "install the NVIDIA driver, or run with --device cpu" if needed else ""
        return [Line(name="GPUs", status=STOP if needed else OK, found="none (nvidia-smi tells none): device cpu only", do=do)]
    names = ", ".join(dict.fromkeys(card["name"] for card in cards))
    lines = [Line(name="GPUs", status=OK, found=f"{len(cards)} × {names}, driver {cards[0]['driver']}")]
    lines.append(_torch_line(torch, len(cards)))
    lines += _gpu_use() + (_links() if len(cards) > 1 else [])
    return lines


def _torch_line(torch: Mapping[str, Any] | None, num_cards: int) -> Line:
    if torch is None:
        return Line(
            name="torch", status=STOP, found="torch did not start", do='run `python -c "import torch"` and read its error'
        )
    found = f"torch {torch['version']} built for CUDA {torch['built_for']}, sees {torch['num_gpus']} GPUs"
    if not torch["is_available"]:
        return Line(name="torch", status=STOP, found=found, do="install a CUDA build of torch that this driver can run")
    if torch["num_gpus"] < num_cards:
        return Line(name="torch", status=WARN, found=found, do="CUDA_VISIBLE_DEVICES hides some; unset it to use all")
    return Line(name="torch", status=OK, found=f"{found}, compute capability {'.'.join(map(str, torch['capability']))}")


def _gpu_use() -> list[Line]:
    query = "index,memory.used,utilization.gpu,temperature.gpu"
    text = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]) or ""
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines() if row.strip()]
    busy = [f"GPU {i}: {used} MiB used, {load} % busy" for i, used, load, _ in rows if _number(used) > 1024 or _number(load) > 5]
    hot = [f"GPU {i}: {degrees} °C" for i, _, _, degrees in rows if _number(degrees) > 80]
    if busy or hot:
        do = "end other work on the GPUs and let them cool: neighbours change the numbers"
        return [Line(name="GPU use", status=WARN, found="; ".join([*busy, *hot]), do=do)]
    return [Line(name="GPU use", status=OK, found="idle")]


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def _links() -> list[Line]:
    text = run(["nvidia-smi", "topo", "-m"])
    if text is None:
        return [Line(name="topology", status=WARN, found="nvidia-smi topo -m told nothing", do="check the driver's installation")]
    kinds = link_kinds(text)
    found = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    slow = {kind for kind in kinds if not kind.startswith("NV")}
    do = "no NVLink between some GPUs: all-reduce goes over PCIe, so expect narrow trees to win" if slow else ""
    return [Line(name="topology", status=WARN if slow else OK, found=found or "unknown", do=do)]


def link_kinds(topology: str) -> dict[str, int]:
    """Return how many pairs of GPUs each kind of link joins (NV18, PIX, NODE, SYS, …), from `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]
    matrix = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > 1 and not row[1].startswith("GPU")]
    kinds: dict[str, int] = {}
    for i, row in enumerate(matrix):
        for cell in row[1 : 1 + len(matrix)][:i]:
            kinds[cell] = kinds.get(cell, 0) + 1
    return kinds


def leftovers() -> list[Line]:
    """Check for leases of servers that an earlier run did not stop."""
    from ddtree_bench.backends.leases import default_lease_dir
    from ddtree_bench.backends.supervisor import start_time

    running: list[str] = []
    stale: list[str] = []
    for file in sorted(default_lease_dir().glob("*.lease")):
        try:
            lease = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        start = lease.get("driver_start")
        is_alive = start is not None and start_time(lease["driver_pid"]) == start
        (running if is_alive else stale).append(" ".join(lease.get("command", [])[:6]))
    lines = []
    if running:
        do = "wait for it: two runs on one machine disturb each other"
        lines.append(Line(name="other runs", status=WARN, found=f"{len(running)} in progress: {running[0]}", do=do))
    if stale:
        do = "nothing: the next sweep or comparison clears it"
        lines.append(Line(name="leftovers", status=WARN, found=f"{len(stale)} servers of ended runs: {stale[0]}", do=do))
    return lines or [Line(name="leftovers", status=OK, found="none of earlier runs")]
