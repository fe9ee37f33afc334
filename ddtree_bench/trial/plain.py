"""What the target itself writes: outputs of plain decoding for the gate's prompts, kept once a study in plain.json.

Plain decoding is asked one request at a time, so that nothing but the target and the prompt is in its text; what a trial serves
is asked as many at once as its load sends, and at the load's temperature too where both sides can be compared there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_bench.backends import http
from ddtree_bench.config import SweepSpec
from ddtree_bench.errors import ServerError
from ddtree_bench.records import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class GatePrompt:
    """One prompt of the losslessness gate, as plain text, and how its output is chosen; temperature 0 is greedy.

    `max_tokens` wins over that of the call.
    """

    prompt_id: str
    text: str
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlainOutput:
    """Output of plain decoding. `tokens`, `top` (the two best by log-probability, at each token) and `top_logits` may be unknown.

    `top_logits` holds the target's own highest logit at each token.
    """

    prompt_id: str
    text: str
    tokens: Sequence[str] | None = None
    top: Sequence[Mapping[str, float]] | None = None
    top_logits: Sequence[float] | None = None
    temperature: float = 0.0


def gate_prompts(spec: SweepSpec) -> list[GatePrompt]:
    """Return prompts of the study's own data set, to be asked greedily; of a conversation, the texts of its messages.

    As far as there are others, none of them is measured: a server with a prefix cache would know it already. A load of several
    requests at once has at least two.
    """
    from ddtree_bench.load.workloads import workload_of

    wanted = max(spec.gates.num_gate_prompts, min(gate_concurrency(spec), 2))
    prompts = workload_of(dataclasses.replace(spec.load, num_warmups=wanted)).warmups
    return [
        GatePrompt(
            prompt_id=p.prompt_id,
            text=p.text if p.text is not None else _joined(p.messages or ()),
            seed=p.seed(spec.load.seed + i),  # a data set with few prompts repeats them, each time with another seed
        )
        for i, p in enumerate(prompts)
    ]


def sampled(prompts: Sequence[GatePrompt], temperature: float) -> list[GatePrompt]:
    """Return the same prompts, to be asked at a temperature."""
    return [dataclasses.replace(prompt, temperature=temperature) for prompt in prompts]


def gate_concurrency(spec: SweepSpec) -> int:
    """Return how many requests the load may send at once; an open loop without a cap may send all."""
    load = spec.load
    return load.max_concurrency or (1 if load.request_rate is None else load.num_prompts)


def is_noise_keyed(info: Mapping[str, Any]) -> bool:
    """Return whether a server tells that its noise depends on seed and position alone: sampled texts can then be compared."""
    block = info.get("ddtree")
    return isinstance(block, Mapping) and block.get("noise_keyed_by_position") is True


def _joined(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def plain_key(spec: SweepSpec, prompts: Sequence[GatePrompt]) -> str:
    """Return what plain outputs depend on: target, arithmetic and prompts, but no setting of the speculation."""
    server = spec.server
    parts = [server.backend, server.model, server.dtype, server.tensor_parallel, server.device, server.load_format]
    parts += [list(server.extra_args), dict(server.env), spec.gates.gate_max_tokens]
    parts += [[prompt.prompt_id, prompt.text] for prompt in prompts]
    if spec.load.temperature > 0:
        parts += [spec.load.temperature, [prompt.seed for prompt in prompts]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_plain(path: Path, key: str, outputs: Sequence[PlainOutput], provenance: Mapping[str, Any] | None = None) -> None:
    """Write plain outputs with the key that they belong to, and where they were made."""
    rows = [dataclasses.asdict(output) for output in outputs]
    write_json(path, {"key": key, "provenance": dict(provenance or {}), "outputs": rows})


def read_plain(path: Path, key: str) -> list[PlainOutput] | None:
    """Return the kept plain outputs; None where there are none for this key."""
    if not path.exists():
        return None
    kept = read_json(path)
    return [PlainOutput(**row) for row in kept["outputs"]] if kept["key"] == key else None


def collect_plain(
    url: str,
    model: str,
    prompts: Sequence[GatePrompt],
    *,
    max_tokens: int,
    timeout_s: float,
    extra: Mapping[str, Any] | None = None,
) -> list[PlainOutput]:
    """Ask a plain server for outputs one at a time, with the two best tokens of each step where it can tell them.

    Args:
        extra: further fields of every request.
    """
    outputs = []
    for prompt in prompts:
        body = {**gate_body(model, prompt, max_tokens), **(extra or {})}
        try:
            answer = http.post(f"{url}/v1/completions", {**body, "logprobs": 2}, timeout_s=timeout_s)
        except ServerError as error:
            if error.kind != "http_400":
                raise
            answer = http.post(f"{url}/v1/completions", body, timeout_s=timeout_s)
        choice = choice_of(answer)
        detail = choice.get("logprobs") or {}
        tokens, top = detail.get("tokens"), detail.get("top_logprobs")
        is_known = tokens and top and "".join(tokens) == choice["text"]
        known = {name: detail.get(key) for name, key in _DETAILS.items()} if is_known else {}
        outputs.append(PlainOutput(prompt_id=prompt.prompt_id, text=choice["text"], temperature=prompt.temperature, **known))
    return outputs


_DETAILS = {"tokens": "tokens", "top": "top_logprobs", "top_logits": "top_logits"}  # our name → the server's


def collect_texts(
    url: str, model: str, prompts: Sequence[GatePrompt], *, max_tokens: int, timeout_s: float, concurrency: int = 1
) -> list[str]:
    """Ask any server for outputs, `concurrency` requests at once; an interrupt leaves requests that the server's end will end."""

    def ask(prompt: GatePrompt) -> str:
        answer = http.post(f"{url}/v1/completions", gate_body(model, prompt, max_tokens), timeout_s=timeout_s)
        return str(choice_of(answer)["text"])

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        return list(pool.map(ask, prompts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def gate_body(model: str, prompt: GatePrompt, max_tokens: int) -> dict[str, Any]:
    """Return the body of one completion; only a sampled one names a seed."""
    seed = {"seed": prompt.seed} if prompt.temperature > 0 else {}
    tokens = prompt.max_tokens or max_tokens
    return {"model": model, "prompt": prompt.text, "max_tokens": tokens, "temperature": prompt.temperature, **seed}


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
