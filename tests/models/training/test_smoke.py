"""Every stage of training at a small scale on the CPU, stopped and resumed on the way."""

import json
import math
from pathlib import Path

import pytest
import torch

from ddtree_bench.models.training.__main__ import main
from ddtree_bench.models.training.prompts import cut_prompts
from ddtree_bench.models.weights import MAX_SHARD_BYTES, load_drafter, load_target


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_stages_with_stop_and_resume(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    cut_prompts(prompts, 9)
    common = ["--workdir", str(tmp_path / "work"), "--scale", "smoke", "--device", "cpu", "--no-compile"]
    common += ["--threads", "1", "--prompts", str(prompts), "--num-prompts", "9", "--new-tokens", "24"]
    main(["corpus", "tokenizer", *common])
    main(["target", *common, "--target-seconds", "6"])
    state = torch.load(tmp_path / "work" / "target.state.pt", weights_only=True)
    main(["target", *common, "--target-seconds", "14"])
    resumed = torch.load(tmp_path / "work" / "target.state.pt", weights_only=True)
    assert resumed["step"] > state["step"]
    assert resumed["used_s"] >= 14 > state["used_s"]
    losses = [row["validation_loss"] for row in rows(tmp_path / "work" / "target.log.jsonl") if "validation_loss" in row]
    assert losses[-1] < math.log(512) - 1
    main(["generate", *common, "--generate-tokens", "8e3"])
    main(["drafter", *common, "--drafter-seconds", "4"])
    main(["drafter", *common, "--drafter-seconds", "10"])
    main(["export", "evaluate", *common])
    export = tmp_path / "work" / "export"
    target = load_target(export / "tiny-dense")
    load_drafter(export / "tiny-dense-dflash", target=target.config)
    assert all(path.stat().st_size <= MAX_SHARD_BYTES for path in export.rglob("*") if path.is_file())
    evaluation = json.loads((tmp_path / "work" / "evaluation.json").read_text())
    lengths = evaluation["temperature_0.0"]["acceptance_length"]["all"]
    assert lengths["tree63 at 0.6"] >= lengths["tree7 at 0.6"] >= 1.0
