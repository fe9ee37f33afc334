"""`ddtree-bench serve` as a process of its own over checkpoints with random weights."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512


def write_checkpoints(folder: Path) -> Path:
    """Write config.json of a tiny target and its drafter, and a byte-level tokenizer for the target."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from ddtree_bench.models.dflash import DFlashConfig
    from ddtree_bench.models.qwen3 import Qwen3Config

    target = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=1024,
    )
    drafter = DFlashConfig(
        layers=dataclasses.replace(target, num_hidden_layers=1),
        block_size=8,
        mask_token_id=VOCAB_SIZE - 1,
        target_layer_ids=(0, 1),
        num_target_layers=2,
    )
    for name, config in (("target", target.to_dict()), ("drafter", drafter.to_dict())):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary |= {f"<{index}>": index for index in range(len(letters), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def command(folder: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "ddtree_bench", "serve", "--port", "0", "--load-format", "dummy", "--threads", "1"),
        *("--model", str(folder / "target"), "--drafter", str(folder / "drafter"), "--max-total-tokens", "16384", *flags),
    ]


@dataclasses.dataclass
class Served:
    """A running server process; `stderr` is the file that its log goes to."""

    process: subprocess.Popen[str]
    stderr: Path
    url: str = ""

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            text = answer.read().decode()
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def metric(self, name: str) -> float:
        line = next(line for line in self.get("/metrics").splitlines() if line.startswith(name + "{"))
        return float(line.rsplit(" ", 1)[1])


@contextmanager
def started(folder: Path, log: Path, *flags: str) -> Iterator[Served]:
    """Start a server and kill it at the end if it still runs; the URL is not known yet."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command(folder, *flags), stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        yield Served(process, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(folder: Path, log: Path, *flags: str) -> Iterator[Served]:
    """Start a server and wait for the URL on its standard output."""
    with started(folder, log, *flags) as served:
        assert served.process.stdout is not None
        lines = []
        for line in served.process.stdout:
            lines.append(line)
            if line.startswith("http://"):
                break
        assert "".join(lines[-1:]).startswith("http://"), log.read_text()
        assert not any("http://" in line for line in lines[:-1])
        served.url = lines[-1].strip()
        yield served


def wait_until(condition: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
