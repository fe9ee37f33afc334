"""Round trip, incremental text and chat rendering of a tokenizer made in the test."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from ddtree_bench.models.tokenizer import LONG_TEXT, Tokenizer
from ddtree_bench.models.training.settings import SMOKE, SPECIAL_TOKENS
from ddtree_bench.models.training.vocabulary import write_tokenizer_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of single bytes: every non-ASCII character is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*SPECIAL_TOKENS, *alphabet])}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(SPECIAL_TOKENS))
    fast.save(str(tmp_path / "tokenizer.json"))
    write_tokenizer_settings(tmp_path, SMOKE)
    return tmp_path


TEXT = "def f(x):\n    return 'é€😀' + x  # naïve"


def test_round_trip_and_ends(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.eos_token_ids == (0, 3)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_pieces_are_whole_characters_and_join_to_the_text(folder: Path, step: int) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(TEXT)
    stream = tokenizer.detokenizer()
    pieces = [stream.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == TEXT


def test_unfinished_character_comes_out_only_at_the_end(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    stream = tokenizer.detokenizer()
    assert stream.push(tokenizer.encode("a😀")[:-1]) == ""
    assert stream.flush().startswith("a")


def test_chat_is_rendered_by_the_checkpoint_s_template(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="needs a checkpoint with chat_template"):
        Tokenizer.load(folder).apply_chat_template(messages)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"], ids=["torn", "list"])
def test_broken_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{name} must hold"):
        Tokenizer.load(folder)


def test_long_text_has_the_tokens_of_its_parts(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    times = LONG_TEXT // len(TEXT) + 1
    assert tokenizer.encode(TEXT * times) == tokenizer.encode(TEXT) * times
