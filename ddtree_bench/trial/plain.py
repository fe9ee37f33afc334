"""What the target itself writes: outputs of plain decoding for the gate's prompts, kept once a study in plain.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_bench.backends import http
from ddtree_bench.config import SweepSpec
from ddtree_bench.errors import ServerError
from ddtree_bench.records import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class GatePrompt:
    """One prompt of the losslessness gate, as plain text."""

    prompt_id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PlainOutput:
    """Greedy output of plain decoding. `tokens` and `top` (the two best by log-probability, at each token) may be unknown."""

    prompt_id: str
    text: str
    tokens: Sequence[str] | None = None
    top: Sequence[Mapping[str, float]] | None = None


def gate_prompts(spec: SweepSpec) -> list[GatePrompt]:
    """Return prompts of the study's own data set; of a conversation, the texts of its messages.

    As far as there are others, none of them is measured: a server with a prefix cache would know it already.
    """
    from ddtree_bench.load.workloads import workload_of

    prompts = workload_of(dataclasses.replace(spec.load, num_warmups=spec.gates.num_gate_prompts)).warmups
    return [GatePrompt(prompt_id=p.prompt_id, text=p.text if p.text is not None else _joined(p.messages or ())) for p in prompts]


def _joined(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def plain_key(spec: SweepSpec, prompts: Sequence[GatePrompt]) -> str:
    """Return what plain outputs depend on: target, arithmetic and prompts, but no setting of the speculation."""
    server = spec.server
    parts = [server.backend, server.model, server.dtype, server.tensor_parallel, server.device, server.load_format]
    parts += [list(server.extra_args), dict(server.env), spec.gates.gate_max_tokens]
    parts += [[prompt.prompt_id, prompt.text] for prompt in prompts]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_plain(path: Path, key: str, outputs: Sequence[PlainOutput]) -> None:
    """Write plain outputs with the key that they belong to."""
    write_json(path, {"key": key, "outputs": [dataclasses.asdict(output) for output in outputs]})


def read_plain(path: Path, key: str) -> list[PlainOutput] | None:
    """Return the kept plain outputs; None where there are none for this key."""
    if not path.exists():
        return None
    kept = read_json(path)
    return [PlainOutput(**row) for row in kept["outputs"]] if kept["key"] == key else None


def collect_plain(url: str, model: str, prompts: Sequence[GatePrompt], *, max_tokens: int, timeout_s: float) -> list[PlainOutput]:
    """Ask a plain server for greedy outputs one at a time, with the two best tokens of each step where it can tell them."""
    outputs = []
    for prompt in prompts:
        body = greedy_body(model, prompt, max_tokens)
        try:
            answer = http.post(f"{url}/v1/completions", {**body, "logprobs": 2}, timeout_s=timeout_s)
        except ServerError as error:
            if error.kind != "http_400":
                raise
            answer = http.post(f"{url}/v1/completions", body, timeout_s=timeout_s)
        choice = choice_of(answer)
        detail = choice.get("logprobs") or {}
        tokens, top = detail.get("tokens"), detail.get("top_logprobs")
        known = {"tokens": tokens, "top": top} if tokens and top and "".join(tokens) == choice["text"] else {}
        outputs.append(PlainOutput(prompt_id=prompt.prompt_id, text=choice["text"], **known))
    return outputs


def collect_texts(url: str, model: str, prompts: Sequence[GatePrompt], *, max_tokens: int, timeout_s: float) -> list[str]:
    """Ask any server for greedy outputs, one at a time."""
    return [
        choice_of(http.post(f"{url}/v1/completions", greedy_body(model, prompt, max_tokens), timeout_s=timeout_s))["text"]
        for prompt in prompts
    ]


def greedy_body(model: str, prompt: GatePrompt, max_tokens: int) -> dict[str, Any]:
    """Return the body of one greedy completion."""
    return {"model": model, "prompt": prompt.text, "max_tokens": max_tokens, "temperature": 0}


def choice_of(answer: Any) -> dict[str, Any]:
    """Return the first choice of a completion.

    Raises:
        ServerError: kind "bad_answer" where there is none.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not choices or not isinstance(choices[0].get("text"), str):
        raise ServerError(f"a completion must hold a text; given {str(answer)[:200]}", kind="bad_answer")
    choice: dict[str, Any] = choices[0]
    return choice
