"""Data sets: shapes of rows, clear errors, selection, seeds."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddtree_bench.config import LoadSpec
from ddtree_bench.load.workloads import Prompt, read_dataset, select, workload_of


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "text", "output_tokens"),
    [
        ({"prompt": "a"}, "a", None),
        ({"prompt": "a", "output_tokens": 7}, "a", 7),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}, "a", 9),
        ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, "a", None),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]}, "a", None),
        ({"conversation": [{"role": "user", "content": "a"}]}, "a", None),
    ],
)
def test_row_shape(tmp_path: Path, row: dict[str, Any], text: str, output_tokens: int | None) -> None:
    (prompt,) = read_dataset("jsonl", write(tmp_path / "d.jsonl", row)).prompts
    assert (prompt.as_text(), prompt.output_tokens) == (text, output_tokens)
    assert prompt.as_messages() == [{"role": "user", "content": text}]


def test_conversation_needs_the_chat_endpoint(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    (prompt,) = read_dataset("jsonl", write(tmp_path / "d.jsonl", {"messages": messages})).prompts
    assert prompt.as_messages() == messages
    with pytest.raises(ValueError, match="endpoint chat"):
        prompt.as_text()


def test_json_array_as_sharegpt_is_published(tmp_path: Path) -> None:
    rows = [{"id": "x", "conversations": [{"from": "human", "value": f"hello {i}"}]} for i in range(2)]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    prompts = read_dataset("sharegpt", path).prompts
    assert [prompt.prompt_id for prompt in prompts] == ["x", "x@2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "d.jsonl:2 must hold one JSON object"),
        ("[1]", "d.jsonl:2 must hold a JSON object"),
        ("[" * 100_000, "d.jsonl:2 must hold one JSON object"),
        ({"text": "a"}, 'd.jsonl:2 must have "prompt"'),
        ({"prompt": ""}, "d.jsonl:2: .*not empty"),
        ({"prompt": 3}, "d.jsonl:2: .*not empty"),
        ({"prompt": "a", "output_tokens": 0}, "d.jsonl:2: output_tokens"),
        ({"messages": []}, 'd.jsonl:2: "messages"'),
        ({"messages": [{"role": "user"}]}, 'd.jsonl:2: "messages"'),
        ({"turns": []}, 'd.jsonl:2: "turns"'),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, 'd.jsonl:2: "conversations"'),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_dataset("jsonl", write(tmp_path / "d.jsonl", {"prompt": "good"}, row))


def test_names_paths_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of bundled.*given 'nope'"):
        read_dataset("nope")
    with pytest.raises(ValueError, match="dataset_path must be given"):
        read_dataset("jsonl")
    with pytest.raises(ValueError, match="at least one row"):
        read_dataset("jsonl", write(tmp_path / "d.jsonl"))
    with pytest.raises(FileNotFoundError):
        read_dataset("jsonl", tmp_path / "none.jsonl")


def test_a_path_makes_the_bundled_name_jsonl(prompts_file: Path) -> None:
    dataset = read_dataset("bundled", prompts_file)
    assert (dataset.name, dataset.sha256) == ("jsonl", hashlib.sha256(prompts_file.read_bytes()).hexdigest())


def test_selection_is_balanced_seeded_and_unique(prompts_file: Path) -> None:
    dataset = read_dataset("jsonl", prompts_file)
    chosen = select(dataset, num_prompts=6, seed=1).prompts
    assert Counter(prompt.class_ for prompt in chosen) == {"code": 2, "prose": 2, "test": 2}
    assert len({prompt.prompt_id for prompt in chosen}) == 6
    assert chosen == select(dataset, num_prompts=6, seed=1).prompts
    assert chosen != select(dataset, num_prompts=6, seed=2).prompts
    everything = select(dataset, num_prompts=12, seed=1).prompts
    assert {prompt.prompt_id for prompt in everything} == {prompt.prompt_id for prompt in dataset.prompts}
    assert everything[:6] == chosen


def test_warmups_are_not_measured_as_long_as_there_are_others(prompts_file: Path) -> None:
    dataset = read_dataset("jsonl", prompts_file)
    load = select(dataset, num_prompts=8, num_warmups=6, seed=1)
    assert not {p.prompt_id for p in load.prompts} & {p.prompt_id for p in load.warmups}
    assert len(load.warmups) == 6
    assert not load.notes
    assert "warm-up" in select(dataset, num_prompts=12, num_warmups=1).notes[0]


def test_more_prompts_than_rows_repeat_with_ids_and_seeds_of_their_own(prompts_file: Path) -> None:
    load = select(read_dataset("jsonl", prompts_file), num_prompts=25)
    assert len({prompt.prompt_id for prompt in load.prompts}) == 25
    assert load.prompts[12].prompt_id == f"{load.prompts[0].prompt_id}#2"
    assert load.prompts[24].prompt_id == f"{load.prompts[0].prompt_id}#3"
    assert len({prompt.seed(0) for prompt in load.prompts}) == 25
    assert "repeat" in load.notes[0]


def test_duplicate_rows_are_used_once(tmp_path: Path) -> None:
    dataset = read_dataset("jsonl", write(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}))
    assert [prompt.text for prompt in dataset.prompts] == ["a", "b"]
    assert "repeats 1" in dataset.notes[0]


def test_seed_depends_on_load_seed_and_row_alone() -> None:
    one, two = Prompt(prompt_id="a", index=3, text="x"), Prompt(prompt_id="b", index=3, text="y")
    assert one.seed(7) == two.seed(7) != one.seed(8)
    assert 0 <= one.seed(7) < 2**31


def test_bundled_prompts_are_package_data() -> None:
    try:
        load = workload_of(LoadSpec(num_prompts=6, num_warmups=2))
    except FileNotFoundError:
        pytest.skip("this checkout has no bundled prompts yet")
    assert len(load.prompts) == 6
    assert load.dataset["name"] == "bundled"
    assert len({prompt.class_ for prompt in load.prompts}) > 1
