"""`doctor`: what it says of a machine, of checkpoints and of pairs, and that a stop is exit status 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddtree_bench.cli import doctor_checks, doctor_models
from ddtree_bench.cli.doctor import command
from ddtree_bench.cli.doctor_checks import OK, STOP, WARN, Line, link_kinds

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
DRAFTER = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 1, 3]},
}


def checkpoint(folder: Path, config: dict, *, weight_bytes: int = 2048) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * weight_bytes)
    return folder


def statuses(lines: list[Line]) -> dict[str, str]:
    return {line.name: line.status for line in lines}


def test_whole_pair_is_ok(tmp_path: Path) -> None:
    model, drafter = checkpoint(tmp_path / "m", TARGET), checkpoint(tmp_path / "d", DRAFTER)
    lines = doctor_models.check(str(model), str(drafter), 2)
    assert {line.status for line in lines} == {OK}
    assert "belong together" in lines[-1].found


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"hidden_size": 32}, "hidden_size 64 and 32"),
        ({"vocab_size": 101}, "vocab_size 100 and 101"),
        ({"dflash_config": {"mask_token_id": 100, "target_layer_ids": [0]}}, "mask_token_id 100 outside"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [4]}}, "target layer 4 of a target with 4"),
        ({"dflash_config": {}}, "no mask_token_id"),
        ({"num_target_layers": 36}, "trained for a target of 36 layers"),
    ],
    ids=["width", "vocabulary", "mask", "layers", "no dflash_config", "depth"],
)
def test_drafter_of_another_target_stops(changes: dict, fault: str) -> None:
    (line,) = doctor_models.pair(TARGET, DRAFTER | changes)
    assert line.status == STOP
    assert fault in line.found


@pytest.mark.parametrize(("ranks", "status"), [(1, OK), (2, OK), (4, OK), (8, OK), (3, STOP)])
def test_heads_divide_over_ranks(tmp_path: Path, ranks: int, status: str) -> None:
    lines = doctor_models.check(str(checkpoint(tmp_path / "m", TARGET)), None, ranks)
    assert statuses(lines)["model heads"] == status


def test_folder_that_is_no_checkpoint_stops(tmp_path: Path) -> None:
    assert statuses(doctor_models.check(str(tmp_path / "none"), None, 1)) == {"model": STOP}


def test_weights_that_are_pointers_or_missing_stop(tmp_path: Path) -> None:
    pointer = checkpoint(tmp_path / "pointer", TARGET, weight_bytes=130)
    assert statuses(doctor_models.check(str(pointer), None, 1))["model weights"] == STOP
    partial = checkpoint(tmp_path / "partial", TARGET)
    (partial / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    assert statuses(doctor_models.check(str(partial), None, 1))["model weights"] == STOP


def test_multimodal_config_is_read_by_its_text_part(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TARGET})
    config = doctor_models.read_config(folder)
    assert config is not None
    assert config["hidden_size"] == 64


def test_links_are_counted_by_pair() -> None:
    text = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tNV18\tSYS\t0-7\nGPU1\tNV18\t X \tSYS\t0-7\nGPU2\tSYS\tSYS\t X \t8-15\n"
    assert link_kinds(text) == {"NV18": 1, "SYS": 2}


@pytest.mark.parametrize(("device", "status"), [("cuda", STOP), ("cpu", OK), (None, OK)])
def test_no_gpu_stops_only_what_needs_one(monkeypatch: pytest.MonkeyPatch, device: str | None, status: str) -> None:
    monkeypatch.setattr("ddtree_bench.records.gpu_inventory", list)
    monkeypatch.setattr(doctor_checks, "version_of", lambda package: None)
    assert [line.status for line in doctor_checks.gpus(device)] == [status]


def test_cpu_build_of_torch_beside_a_gpu_stops() -> None:
    told = {"version": "2.9+cpu", "built_for": None, "is_available": False, "num_gpus": 0, "capability": None}
    assert doctor_checks._torch_line(told, 8).status == STOP


def test_missing_package_stops_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "version_of", lambda package: None if package == "optuna" else "1.0")
    bad = [line for line in doctor_checks.packages() if line.status != OK]
    assert [(line.status, "pip install optuna" in line.do) for line in bad] == [(STOP, True)]


@pytest.mark.parametrize(("value", "status"), [("1", OK), ("100000", WARN)])
def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch, value: str, status: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    lines = {line.name: line for line in doctor_checks.limits()}
    assert lines["threads"].status == status


def test_every_line_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--model", str(tmp_path / "none"), "--json"])
    told = json.loads(done.output.splitlines()[-1])
    assert done.exit_code == 1
    assert told["stops"] >= 1
    assert all(line["do"] for line in told["lines"] if line["status"] != "ok")


def test_exit_status_reaches_the_shell(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ddtree_bench", "doctor", "--model", str(tmp_path / "none")]
    assert subprocess.run(words, capture_output=True, timeout=120, check=False).returncode == 1
