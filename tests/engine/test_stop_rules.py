"""Where a request ends, also inside an accepted span, and that tokens, counts and cache length are cut with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_support import PLAIN, engine_of, prompt_of, request_of, tokens_of, use_oracle, write_pair

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.request import GenerationUpdate
from ddtree_bench.engine.sequence import SequenceState
from ddtree_bench.engine.text_stream import TextStream

STOP, EOS = 99, 98
TREE = TreeSetting(mode="tree", block_size=16, node_budget=15, top_k=4)


class Letters:
    """A detokenizer: token i is the i-th letter."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)

    def flush(self) -> str:
        return ""


def sequence_of(*, max_context: int = 1000, text: TextStream | None = None, **sampling: Any) -> SequenceState:
    sequence = SequenceState(
        request=request_of("r", [1, 2, 3], **sampling),
        max_context=max_context,
        eos_token_ids=frozenset({EOS}),
        text=text or TextStream(None),
    )
    sequence.num_cached = 3
    return sequence


def output_of(sequence: SequenceState) -> list[int]:
    return sequence.tokens[3:]


def check_counts(updates: Sequence[GenerationUpdate]) -> None:
    last = updates[-1]
    spec = last.spec
    assert last.num_output_tokens == len(tokens_of(updates))
    assert last.num_output_tokens == 1 + spec.num_accepted + spec.num_verify_steps - spec.num_cut
    assert sum(spec.accepted_histogram) == spec.num_verify_steps
    assert sum(i * n for i, n in enumerate(spec.accepted_histogram)) == spec.num_accepted


def test_a_stop_token_inside_an_accepted_span_ends_the_output_there() -> None:
    sequence = sequence_of(max_tokens=5, stop_token_ids=(STOP,))
    sequence.start_from_prefill(10)
    sequence.end_verify_step([11, STOP, 20, 21, 22], num_draft_tokens=15)
    assert output_of(sequence) == [10, 11, STOP]
    assert (sequence.finish_reason, sequence.matched_stop) == ("stop", STOP)
    assert (sequence.num_accepted, sequence.num_verify_steps, sequence.num_cut) == (4, 1, 3)
    assert sequence.num_cached == len(sequence.tokens)


def test_max_tokens_before_the_stop_token_is_a_length_end() -> None:
    sequence = sequence_of(max_tokens=5, stop_token_ids=(STOP,))
    sequence.start_from_prefill(10)
    sequence.end_verify_step([11, 12, 13, 14, STOP, 20], num_draft_tokens=15)
    assert output_of(sequence) == [10, 11, 12, 13, 14]
    assert (sequence.finish_reason, sequence.matched_stop) == ("length", None)


def test_a_stop_token_that_is_the_last_allowed_token_is_a_stop() -> None:
    sequence = sequence_of(max_tokens=3, stop_token_ids=(STOP,))
    sequence.start_from_prefill(10)
    sequence.end_verify_step([11, STOP, 12], num_draft_tokens=15)
    assert sequence.finish_reason == "stop"


def test_nothing_follows_the_end_of_text() -> None:
    sequence = sequence_of()
    sequence.start_from_prefill(10)
    assert sequence.end_verify_step([11, EOS, 12, 13], num_draft_tokens=7) == 2
    assert output_of(sequence) == [10, 11, EOS]
    assert sequence.num_cached == len(sequence.tokens)


def test_ignore_eos_still_minds_stop_token_ids() -> None:
    sequence = sequence_of(ignore_eos=True, stop_token_ids=(STOP,))
    sequence.start_from_prefill(EOS)
    sequence.end_verify_step([EOS, STOP, 1], num_draft_tokens=7)
    assert output_of(sequence) == [EOS, EOS, STOP]


def test_max_tokens_is_never_overshot() -> None:
    sequence = sequence_of(max_tokens=7)
    sequence.start_from_prefill(10)
    sequence.end_verify_step(list(range(16)), num_draft_tokens=15)
    update = sequence.take_update()
    assert update is not None
    assert (update.num_output_tokens, len(update.token_ids), update.finish_reason) == (7, 7, "length")
    check_counts([update])


def test_a_request_can_end_with_its_first_token() -> None:
    for sampling, reason in (({"max_tokens": 1}, "length"), ({"stop_token_ids": (7,)}, "stop")):
        sequence = sequence_of(**sampling)
        sequence.start_from_prefill(7)
        assert sequence.finish_reason == reason
        assert sequence.spec_counts().num_verify_steps == 0


def test_the_models_context_is_a_length_end() -> None:
    sequence = sequence_of(max_context=6)
    sequence.start_from_prefill(10)
    sequence.end_verify_step([11, 12, 13], num_draft_tokens=3)
    assert (len(sequence.tokens), sequence.finish_reason) == (6, "length")


def test_an_uncut_step_leaves_the_bonus_uncached() -> None:
    sequence = sequence_of()
    sequence.start_from_prefill(10)
    sequence.end_verify_step([11, 12, 13], num_draft_tokens=7)
    assert sequence.num_cached == len(sequence.tokens) - 1
    assert sequence.is_prefilled


def run_text(stop: Sequence[str], steps: Sequence[Sequence[int]], **sampling: Any) -> tuple[list[str], SequenceState]:
    sequence = sequence_of(text=TextStream(Letters(), stop), stop=tuple(stop), **sampling)
    texts = []
    for index, tokens in enumerate(steps):
        if index == 0:
            sequence.start_from_prefill(tokens[0])
        else:
            sequence.end_verify_step(tokens, num_draft_tokens=9)
        update = sequence.take_update()
        assert update is not None
        texts.append(update.text)
        if update.finish_reason is not None:
            break
    return texts, sequence


def test_a_stop_string_across_tokens_is_never_shown_in_part() -> None:
    texts, sequence = run_text(["cde"], [[0], [1, 2], [3], [4, 5, 6]])
    assert texts == ["a", "b", "", ""]
    assert (sequence.finish_reason, sequence.matched_stop) == ("stop", "cde")
    assert output_of(sequence) == [0, 1, 2, 3, 4]
    assert sequence.num_cut == 2


def test_held_back_text_comes_out_when_it_is_no_stop_string() -> None:
    assert run_text(["cde"], [[0], [2, 3], [5]], max_tokens=4)[0] == ["a", "", "cdf"]
    assert run_text(["cde"], [[0], [2, 3]], max_tokens=3)[0] == ["a", "cd"]


def test_the_earliest_stop_string_wins() -> None:
    texts, sequence = run_text(["xyz", "bc", "c"], [[0], [1, 2, 3]])
    assert "".join(texts) == "a"
    assert sequence.matched_stop == "bc"


def test_a_stop_token_is_counted_but_not_shown() -> None:
    texts, sequence = run_text([], [[0], [1, 25, 2]], stop_token_ids=(25,))
    assert "".join(texts) == "ab"
    assert output_of(sequence) == [0, 1, 25]


@pytest.mark.parametrize("setting", [PLAIN, TreeSetting(mode="linear", block_size=8), TREE], ids=TreeSetting.label)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 30])
def test_counts_add_up_however_a_request_ends(pair: Path, setting: TreeSetting, max_tokens: int) -> None:
    prompts = {f"r{i}": prompt_of(20 + i, 9) for i in range(3)}
    answers = {
        name: tokens_of(each)
        for name, each in engine_of(pair)
        .generate([request_of(name, prompt, max_tokens=40) for name, prompt in prompts.items()])
        .items()
    }
    engine = engine_of(pair, setting)
    if setting.mode != "plain":
        use_oracle(engine, prompts, answers, hit_rate=0.9)
    stop_after = {"r0": (), "r1": (answers["r1"][5],), "r2": (answers["r2"][12],)}
    requests = [
        request_of(name, prompt, max_tokens=max_tokens, stop_token_ids=stop_after[name]) for name, prompt in prompts.items()
    ]
    for name, updates in engine.generate(requests).items():
        check_counts(updates)
        end = next((i + 1 for i, token in enumerate(answers[name]) if token in stop_after[name]), 40)
        assert tokens_of(updates) == answers[name][: min(end, max_tokens)]
        assert updates[-1].finish_reason == ("stop" if end <= max_tokens else "length")


def test_the_checkpoints_end_of_text_is_a_stop(tmp_path: Path) -> None:
    prompt = prompt_of(1, 6)
    answer = tokens_of(engine_of(write_pair(tmp_path / "a")).generate([request_of("r", prompt, max_tokens=20)])["r"])
    engine = engine_of(write_pair(tmp_path / "b", eos_token_id=answer[4]))
    updates = engine.generate([request_of("r", prompt, max_tokens=20)])["r"]
    assert tokens_of(updates) == answer[: answer.index(answer[4]) + 1]
    assert updates[-1].finish_reason == "stop"
