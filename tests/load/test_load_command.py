"""`ddtree-bench load`: files, table, exit status, flags, and what its modules import."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mock_server import running_mock

from ddtree_bench.cli.load import command
from ddtree_bench.records import read_requests

FLAGS = {
    "--base-url", "--endpoint", "--model", "--dataset-name", "--dataset-path", "--num-prompts", "--max-concurrency",
    "--request-rate", "--burstiness", "--temperature", "--max-tokens", "--num-warmups", "--seed", "--ignore-eos", "--timeout",
    "--max-failures", "--result-dir", "--api-key", "--header", "--extra-body", "--json",
}  # fmt: skip


def load(*flags: object) -> Result:
    return CliRunner().invoke(command, [str(flag) for flag in flags])


def test_flags_are_pinned() -> None:
    assert {flag for option in command.params for flag in option.opts} == FLAGS


def test_writes_files_and_prints(prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running_mock() as mock:
        flags = ("--base-url", mock.url + "/v1/", "--dataset-path", prompts_file, "--num-prompts", 4, "--num-warmups", 0)
        for _ in range(2):  # the second load replaces the first one's files
            given = load(*flags, "--max-tokens", 8, "--result-dir", out, "--json")
        assert mock.server.num_generations == 8
    assert given.exit_code == 0, given.output
    assert len(list(read_requests(out / "requests.jsonl"))) == 4
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert json.loads(given.stdout.splitlines()[-1]) == summary
    assert (summary["completed"], summary["total_output_tokens"], summary["num_failed_requests"]) == (4, 32, 0)
    assert summary["dataset"]["sha256"]
    assert summary["load"]["max_tokens"] == 8
    for word in ("ttft_ms", "tpot_ms", "acceptance length (bonus counted)", "drafts accepted per step", "output tok/s"):
        assert word in given.stdout


@pytest.mark.parametrize(("max_failures", "exit_code"), [(0, 1), (1, 1), (2, 0)])
def test_exit_status_tells_failed_requests(prompts_file: Path, tmp_path: Path, max_failures: int, exit_code: int) -> None:
    with running_mock(fault="http_503", fault_every=2) as mock:
        flags = ("--base-url", mock.url, "--dataset-path", prompts_file, "--num-prompts", 4, "--num-warmups", 0)
        given = load(*flags, "--result-dir", tmp_path, "--max-failures", max_failures)
    assert given.exit_code == exit_code
    assert "2 × http_503: overloaded" in given.stdout
    assert (tmp_path / "summary.json").exists()


def test_all_failed_exits_with_1(prompts_file: Path) -> None:
    given = load("--base-url", "http://127.0.0.1:9", "--endpoint", "generate", "--dataset-path", prompts_file, "--num-prompts", 2)
    assert given.exit_code == 1
    assert "connect" in given.stdout


def test_infinite_rate_sends_everything_at_once(prompts_file: Path) -> None:
    with running_mock(first_token_ms=300.0) as mock:
        flags = ("--base-url", mock.url, "--dataset-path", prompts_file, "--num-prompts", 6, "--num-warmups", 0)
        assert load(*flags, "--request-rate", "inf", "--max-tokens", 1).exit_code == 0
        assert mock.server.peak_in_flight == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--extra-body", "{"), "must be a JSON object"),
        (("--header", "x"), "KEY=VALUE"),
    ],
)
def test_bad_flags_are_refused(flags: tuple[str, str], message: str) -> None:
    given = load("--base-url", "http://127.0.0.1:9", *flags)
    assert given.exit_code == 2
    assert message in given.output


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_signal_saves_what_is_there(prompts_file: Path, tmp_path: Path, number: int, status: int) -> None:
    with running_mock(ms_per_round=50.0, acceptance_length=None) as mock:
        flags = ["--base-url", mock.url, "--dataset-path", str(prompts_file), "--num-prompts", "12", "--num-warmups", "0"]
        flags += ["--max-concurrency", "2", "--max-tokens", "20", "--result-dir", str(tmp_path)]
        process = subprocess.Popen([sys.executable, "-m", "ddtree_bench", "load", *flags], stdout=subprocess.DEVNULL)
        log = tmp_path / "requests.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= 2):
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == status
    records = list(read_requests(log))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    kinds = [record.error_kind for record in records]
    assert kinds.count(None) >= 2
    assert kinds.count("cancelled") == 2
    assert summary["is_interrupted"]
    assert len(records) < 12
    assert summary["num_requests"] == len(records)


def test_bench_half_imports_no_gpu_package() -> None:
    script = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'transformers', 'sglang', 'ray', 'optuna', 'pandas'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import ddtree_bench.cli.load, ddtree_bench.cli.mock, ddtree_bench.load.runner, ddtree_bench.load.mock\n"
        "import ddtree_bench.metrics.summary\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_command_modules_import_nothing_heavy() -> None:
    script = (
        "import sys, ddtree_bench.cli.load, ddtree_bench.cli.mock\n"
        "print(sorted({'aiohttp', 'numpy', 'rich', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("flags", [("--num-prompts", "0"), ("--dataset-path", "none.jsonl"), ("--base-url", "http://h:x")])
def test_slip_loses_no_earlier_result(tmp_path: Path, flags: tuple[str, str]) -> None:
    for name in ("requests.jsonl", "summary.json"):
        (tmp_path / name).write_text("{}\n", encoding="utf-8")
    assert load("--base-url", "http://127.0.0.1:9", "--result-dir", tmp_path, *flags).exit_code == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["requests.jsonl", "summary.json"]
    assert (tmp_path / "requests.jsonl").read_text(encoding="utf-8") == "{}\n"
