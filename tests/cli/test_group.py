"""The command group: known names, exit statuses as the shell sees them, errors without a traceback."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ddtree_bench.cli import COMMANDS, root, text_of


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddtree_bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_listed_command_exists() -> None:
    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        assert isinstance(command, click.Command)
        assert command.name == name


def test_unknown_command_names_the_known_ones() -> None:
    done = shell("serv")
    assert done.returncode == 2
    assert "serve, load, sweep" in done.stderr


@pytest.mark.parametrize("words", [("report", "{none}"), ("view", "{none}"), ("compare", "fast", "slow")], ids=lambda w: w[0])
def test_bad_input_is_an_error_without_a_traceback(words: tuple[str, ...], tmp_path: Path) -> None:
    done = shell(*(word.format(none=tmp_path / "none") for word in words))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_failed_load_exits_with_1() -> None:
    """Pitfall of other clients: exit 0 although every request failed."""
    done = shell("load", "--base-url", "http://127.0.0.1:9", "--num-prompts", "2", "--num-warmups", "0", "--model", "m")
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "a.toml"), "a.toml must be usable; No such file; check the path"),
        (OSError(errno.ENOSPC, "No space left"), "the system must allow this; No space left; free space, then give the same"),
        (OSError(errno.EROFS, "Read-only", "out"), "out must be usable; Read-only; give a folder that can be written"),
        (FileNotFoundError("the folder must exist"), "the folder must exist"),
    ],
    ids=["missing", "full", "read-only", "own-words"],
)
def test_refusals_of_the_system_say_what_to_do(error: OSError, text: str) -> None:
    assert text_of(error).startswith(text)


def test_result_folder_that_cannot_be_made_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = shell("load", "--base-url", "http://127.0.0.1:9", "--model", "m", "--result-dir", str(file / "results"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {file}")
    assert "Traceback" not in done.stderr


def test_reader_that_leaves_early_is_no_traceback() -> None:
    command = f"{sys.executable} -m ddtree_bench doctor | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
