"""Text from a real byte-level tokenizer: streamed pieces join to the whole, stop strings cut alike in every mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_support import PLAIN, engine_of, prompt_of, request_of, tokens_of, use_oracle, write_pair
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from ddtree_bench.config import TreeSetting
from ddtree_bench.models.tokenizer import Tokenizer

TREE = TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)
PROMPTS = {f"r{i}": prompt_of(i, 5 + i, 256) for i in range(4)}


@pytest.fixture(scope="module")
def byte_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose tokens are the 256 bytes, so that random output is full of broken characters."""
    folder = write_pair(tmp_path_factory.mktemp("bytes"), vocab_size=256)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(folder / "target" / "tokenizer.json"))
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize("setting", [PLAIN, TREE], ids=TreeSetting.label)
def test_streamed_text_joins_to_the_text_of_all_tokens(byte_pair: Path, setting: TreeSetting) -> None:
    tokenizer = Tokenizer.load(byte_pair / "target")
    requests = [request_of(name, prompt, max_tokens=40) for name, prompt in PROMPTS.items()]
    for updates in engine_of(byte_pair, setting).generate(requests).values():
        assert "".join(update.text for update in updates) == tokenizer.decode(tokens_of(updates))


def test_a_stop_string_ends_every_mode_at_the_same_token(byte_pair: Path) -> None:
    whole = engine_of(byte_pair).generate([request_of(n, p, max_tokens=40) for n, p in PROMPTS.items()])
    answers = {name: tokens_of(updates) for name, updates in whole.items()}
    texts = {name: "".join(update.text for update in updates) for name, updates in whole.items()}
    stops = {name: (text[9:11], text[20:22]) for name, text in texts.items()}
    requests = [request_of(n, p, max_tokens=40, stop=stops[n]) for n, p in PROMPTS.items()]
    engine = engine_of(byte_pair, TREE)
    use_oracle(engine, PROMPTS, answers, hit_rate=0.9)
    plain, tree = engine_of(byte_pair).generate(requests), engine.generate(requests)
    for name in PROMPTS:
        first = min(stops[name], key=texts[name].find)
        for updates in (plain[name], tree[name]):
            assert "".join(update.text for update in updates) == texts[name][: texts[name].find(first)]
            assert (updates[-1].finish_reason, updates[-1].matched_stop) == ("stop", first)
        assert tokens_of(plain[name]) == tokens_of(tree[name])
