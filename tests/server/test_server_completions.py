"""POST /v1/completions: chunks, usage, meta_info, several prompts, logprobs."""

import dataclasses

import pytest
from fake_engine import FakeEngine

BODY = {"model": "fake-model", "prompt": "hello", "max_tokens": 50}


async def test_whole_answer(serve):
    async with serve(FakeEngine()) as client:
        answer = await (await client.post("/v1/completions", json=BODY)).json()
    choice = answer["choices"][0]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake-model"
    assert answer["id"].startswith("cmpl-")
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("abcdefgh", "stop", 7)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    meta = answer["meta_info"]
    assert meta["spec_verify_ct"] == 3
    assert meta["spec_num_correct_drafts"] == 4
    assert meta["spec_num_proposed_drafts"] == 15
    assert meta["spec_correct_drafts_histogram"] == [1, 0, 2]
    assert meta["spec_accept_length"] == pytest.approx(8 / 3)
    assert meta["num_cut"] == 0
    assert meta["finish_reason"] == {"type": "stop", "matched": 7}
    assert choice["meta_info"]["spec_verify_ct"] == 3


async def test_one_chunk_a_round_holds_all_its_text(serve, events):
    async with serve(FakeEngine()) as client:
        chunks = await events(await client.post("/v1/completions", json=BODY | {"stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "bcd", "e", "fgh"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"][0]["meta_info"]["spec_verify_ct"] == 3


async def test_usage_chunk_comes_last_without_choices(serve, events):
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    async with serve(FakeEngine()) as client:
        chunks = await events(await client.post("/v1/completions", json=body))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert chunks[-1]["meta_info"]["spec_num_correct_drafts"] == 4


async def test_continuous_usage_tells_tokens_of_each_chunk(serve, events):
    body = BODY | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with serve(FakeEngine()) as client:
        chunks = await events(await client.post("/v1/completions", json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 4, 5, 8, 8]


async def test_length_cut_counts_what_was_walked(serve):
    async with serve(FakeEngine()) as client:
        answer = await (await client.post("/v1/completions", json=BODY | {"max_tokens": 3})).json()
    meta = answer["meta_info"]
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["num_cut"] == 1
    assert meta["completion_tokens"] == 1 + meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] - meta["num_cut"]


async def test_several_prompts_are_choices_in_order(serve, events):
    engine = FakeEngine(lambda request: ["p", str(len(request.prompt_tokens))])
    body = BODY | {"prompt": ["a", "bb", "ccc"]}
    async with serve(engine) as client:
        answer = await (await client.post("/v1/completions", json=body)).json()
        chunks = await events(await client.post("/v1/completions", json=body | {"stream": True}))
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "p1"), (1, "p2"), (2, "p3")]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}
    assert "meta_info" not in answer
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["p1", "p2", "p3"]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]], ids=["ids", "list-of-ids"])
async def test_token_ids_as_prompt(serve, prompt):
    engine = FakeEngine()
    async with serve(engine) as client:
        assert (await client.post("/v1/completions", json=BODY | {"prompt": prompt})).status == 200
    assert engine.seen[-1].prompt_tokens == (1, 2, 3)


async def test_logprobs_lists_are_parallel_and_hold_no_infinity(serve):
    async with serve(FakeEngine()) as client:
        answer = await (await client.post("/v1/completions", json=BODY | {"logprobs": 2})).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("abcdefgh")
    assert logprobs["text_offset"] == list(range(8))
    assert logprobs["token_logprobs"] == [-0.5] * 8
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -9999.0}
    assert "top_logits" not in logprobs, "this engine tells none"


async def test_top_logits_stand_beside_the_log_probabilities_where_the_engine_tells_them(serve):
    class Telling(FakeEngine):
        def _logprob(self, token, num_top):
            return dataclasses.replace(super()._logprob(token, num_top), top_logit=token / 8)

    async with serve(Telling()) as client:
        answer = await (await client.post("/v1/completions", json=BODY | {"logprobs": 2})).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logits"] == [ord(c) / 8 for c in "abcdefgh"]


async def test_sampling_fields_reach_the_engine(serve):
    engine = FakeEngine()
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "n": 1,
        "best_of": 1,
        "logit_bias": {},
        "echo": False,
    }
    async with serve(engine) as client:
        assert (await client.post("/v1/completions", json=BODY | fields)).status == 200
    sampling = engine.seen[-1].sampling
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
        assert getattr(sampling, name) == fields[name]
    assert (sampling.top_k, sampling.stop, sampling.stop_token_ids) == (0, ("x", "y"), (3,))
    assert sampling.ignore_eos
    assert sampling.max_tokens == 50


async def test_defaults_are_openais(serve):
    engine = FakeEngine()
    async with serve(engine) as client:
        for _ in range(2):
            answer = await (await client.post("/v1/completions", json={"prompt": "x"})).json()
    first, second = (request.sampling for request in engine.seen[-2:])
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens, first.logprobs) == (1.0, 1.0, 0, 16, None)
    assert first.seed != second.seed, "each request without a seed has one of its own"
    assert answer["meta_info"]["seed"] == second.seed


async def test_unknown_fields_are_ignored_and_named(serve):
    async with serve(FakeEngine()) as client:
        answer = await (await client.post("/v1/completions", json=BODY | {"some_router_hint": 3, "user": None})).json()
    assert answer["meta_info"]["ignored_fields"] == ["some_router_hint"]


async def test_a_round_without_text_is_a_chunk_without_text(serve, events):
    async with serve(FakeEngine(["a", "", "é"])) as client:
        chunks = await events(await client.post("/v1/completions", json=BODY | {"stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "", "é"]
