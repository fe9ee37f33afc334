"""What is sent: prompts from the bundled set or a file of the user's own, selected by seed and balanced over classes.

Rows may look as the field writes them: {"prompt"}, {"prompt", "output_tokens"}, OpenAI {"messages"}, MT-bench {"turns"} and
ShareGPT {"conversations"}; of the last two the first turn is sent. The shape is told by each row, not by the data set's name.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ddtree_bench.config import LoadSpec
from ddtree_bench.errors import unknown_name

BUNDLED = "bundled"
DATASET_NAMES = (BUNDLED, "jsonl", "custom", "openai", "sharegpt", "mt-bench", "spec-bench")
_ID_KEYS = ("prompt_id", "question_id", "task_id", "id")
_SHAPES = '"prompt", "messages", "turns" or "conversations"'


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt. `index` is its row in the data set: it gives the sampling seed, whatever was selected around it.

    `text` is the prompt as plain text, None for a conversation of several messages; `messages` are OpenAI messages, None for
    plain text. `output_tokens` is the row's own limit and wins over the load's max_tokens. `repeat` counts how often the
    same row came before in one load.
    """

    prompt_id: str
    index: int
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    class_: str | None = None
    output_tokens: int | None = None
    repeat: int = 0

    def as_messages(self) -> list[Mapping[str, Any]]:
        """Return the prompt for a chat endpoint."""
        return list(self.messages) if self.messages is not None else [{"role": "user", "content": self.text}]

    def as_text(self) -> str:
        """Return the prompt for an endpoint without a chat template.

        Raises:
            ValueError: the row is a conversation that only a chat endpoint can send.
        """
        if self.text is None:
            raise ValueError(
                f"prompt {self.prompt_id!r} must be plain text for this endpoint; given {len(self.messages or ())} messages; "
                "use the endpoint chat"
            )
        return self.text

    def seed(self, load_seed: int) -> int:
        """Return the sampling seed of this prompt under a load's seed (31 bits): the same for every arm of a comparison."""
        digest = hashlib.sha256(f"{load_seed}:{self.index}:{self.repeat}".encode()).digest()
        return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A whole data set: name, the file's SHA-256, its distinct prompts, and what was noticed while reading."""

    name: str
    source: str
    sha256: str
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The prompts that one load sends, in order, and those of its warm-up; `dataset` says where they came from."""

    prompts: tuple[Prompt, ...]
    warmups: tuple[Prompt, ...]
    dataset: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def read_dataset(name: str = BUNDLED, path: str | Path | None = None) -> DataSet:
    """Read a data set: the bundled one, or a JSONL file (or a JSON array, as ShareGPT is published).

    Raises:
        ValueError: unknown name, a bad row (named by file and line), or no rows.
        FileNotFoundError: no such file.
    """
    if name not in DATASET_NAMES:
        raise unknown_name("load.dataset_name", name, DATASET_NAMES)
    if path is not None:
        file = Path(path)
        name = "jsonl" if name == BUNDLED else name
        return _parse(name, str(file), file.read_bytes())
    if name != BUNDLED:
        raise ValueError(f"load.dataset_path must be given with dataset_name {name!r}; only {BUNDLED!r} needs no file")
    packaged = resources.files("ddtree_bench").joinpath("models/bundled/prompts.jsonl")
    if not packaged.is_file():
        raise FileNotFoundError(f"the bundled prompts must lie at {packaged}; give --dataset-path FILE")
    return _parse(name, "ddtree_bench/models/bundled/prompts.jsonl", packaged.read_bytes())


def select(dataset: DataSet, *, num_prompts: int, num_warmups: int = 0, seed: int = 0) -> Workload:
    """Select prompts by seed, balanced over classes, each prompt once.

    When more are asked than exist the selection starts over with new ids (`ID#2`, …) and says so in `notes`; intervals
    are over prompts, so repeats narrow none. Warm-up prompts are ones that are not measured, as far as there are any.
    """
    order = _balanced_order(dataset.prompts, seed)
    prompts = [_repeated(order[i % len(order)], i // len(order)) for i in range(num_prompts)]
    notes = list(dataset.notes)
    if num_prompts > len(order):
        notes.append(
            f"{num_prompts} prompts were asked and {dataset.source} has {len(order)}: prompts repeat, and a server's prefix "
            "cache may flatter TTFT"
        )
    rest = order[num_prompts:] or order
    if num_warmups and num_prompts >= len(order):
        notes.append("the warm-up sends prompts that are measured too: the data set has no others")
    warmups = [rest[i % len(rest)] for i in range(num_warmups)]
    where = {"name": dataset.name, "source": dataset.source, "sha256": dataset.sha256, "num_rows": len(dataset.prompts)}
    return Workload(prompts=tuple(prompts), warmups=tuple(warmups), dataset=where, notes=tuple(notes))


def workload_of(spec: LoadSpec) -> Workload:
    """Return the workload that a load spec names."""
    dataset = read_dataset(spec.dataset_name, spec.dataset_path)
    return select(dataset, num_prompts=spec.num_prompts, num_warmups=spec.num_warmups, seed=spec.seed)


def prompts_of_texts(texts: Sequence[str]) -> tuple[Prompt, ...]:
    """Return plain-text prompts named `text-0`, `text-1`, …"""
    return tuple(Prompt(prompt_id=f"text-{i}", index=i, text=text) for i, text in enumerate(texts))


def _balanced_order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Shuffle each class by seed, then deal one of each class in turn."""
    classes: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        classes.setdefault(prompt.class_ or "", []).append(prompt)
    for name in sorted(classes):
        random.Random(f"{seed}:{name}").shuffle(classes[name])
    longest = max(len(group) for group in classes.values())
    return [classes[name][i] for i in range(longest) for name in sorted(classes) if i < len(classes[name])]


def _repeated(prompt: Prompt, repeat: int) -> Prompt:
    return replace(prompt, prompt_id=f"{prompt.prompt_id}#{repeat + 1}", repeat=repeat) if repeat else prompt


def _parse(name: str, source: str, data: bytes) -> DataSet:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} must be UTF-8 text; {error}") from error
    prompts: list[Prompt] = []
    ids: set[str] = set()
    seen: set[str] = set()
    num_duplicates = 0
    for where, number, row in _rows(source, text):
        prompt = _prompt_of_row(where, number, row)
        key = json.dumps([prompt.text, prompt.messages], sort_keys=True)
        if key in seen:
            num_duplicates += 1
            continue
        seen.add(key)
        if prompt.prompt_id in ids:
            prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}@{number}")
        ids.add(prompt.prompt_id)
        prompts.append(replace(prompt, index=len(prompts)))
    if not prompts:
        raise ValueError(f"{source} must hold at least one row with {_SHAPES}; given an empty file")
    notes = (f"{source} repeats {num_duplicates} prompts; each is used once",) if num_duplicates else ()
    return DataSet(name=name, source=source, sha256=hashlib.sha256(data).hexdigest(), prompts=tuple(prompts), notes=notes)


def _rows(source: str, text: str) -> list[tuple[str, int, Any]]:
    """Return (place, number, value) of every row; the place is file:line, or file:row N in a JSON array."""
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise ValueError(f"{source}:{line} must be a JSON array, or one JSON object a line; {error}") from error
        return [(f"{source}:row {number}", number, value) for number, value in enumerate(values, start=1)]
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"{source}:{number}", number, json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{source}:{number} must hold one JSON object; {error}") from error
    return rows


def _prompt_of_row(where: str, number: int, row: Any) -> Prompt:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} must hold a JSON object with {_SHAPES}; given {type(row).__name__}")
    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None
    if "prompt" in row:
        text = _text(where, '"prompt"', row["prompt"])
    elif "messages" in row:
        messages = _messages(where, row["messages"])
        content = messages[0]["content"] if len(messages) == 1 and messages[0]["role"] == "user" else None
        text = content if isinstance(content, str) else None
    elif "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f'{where}: "turns" must be a list of at least one text; given {turns!r}')
        text = _text(where, "the first of turns", turns[0])
    elif "conversations" in row or "conversation" in row:
        text = _first_human_turn(where, row.get("conversations", row.get("conversation")))
    else:
        raise ValueError(f"{where} must have {_SHAPES}; given the keys {sorted(row)}")
    class_ = row.get("class", row.get("category"))
    row_id = next((row[key] for key in _ID_KEYS if row.get(key) is not None), f"row-{number}")
    return Prompt(
        prompt_id=str(row_id),
        index=number - 1,
        text=text,
        messages=messages,
        class_=None if class_ is None else str(class_),
        output_tokens=_output_tokens(where, row),
    )


def _text(where: str, what: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {what} must be a text that is not empty; given {value!r}")
    return value


def _messages(where: str, value: object) -> tuple[Mapping[str, Any], ...]:
    is_ok = isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value)
    if not is_ok:
        raise ValueError(f'{where}: "messages" must be a list of {{"role", "content"}}; given {value!r}')
    return tuple(value)  # type: ignore[arg-type]


def _first_human_turn(where: str, value: object) -> str:
    for turn in value if isinstance(value, list) else ():
        if isinstance(turn, Mapping) and turn.get("from", turn.get("role")) in ("human", "user"):
            return _text(where, "the first human turn", turn.get("value", turn.get("content")))
    raise ValueError(f'{where}: "conversations" must have a turn from "human" or "user"; given {str(value)[:200]}')


def _output_tokens(where: str, row: Mapping[str, Any]) -> int | None:
    value = row.get("output_tokens", row.get("max_tokens"))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: output_tokens must be an integer of at least 1; given {value!r}")
    return value
