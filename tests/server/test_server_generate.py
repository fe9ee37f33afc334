"""POST /generate, SGLang's own endpoint."""

import pytest
from fake_engine import FakeEngine


async def test_whole_answer(serve):
    engine = FakeEngine()
    async with serve(engine) as client:
        answer = await (await client.post("/generate", json={"text": "hello"})).json()
    assert answer["text"] == "abcdefgh", "the prompt is not in it"
    assert answer["output_ids"] == [ord(c) for c in "abcdefgh"]
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["spec_verify_ct"]) == (5, 8, 3)
    assert meta["spec_accept_rate"] == pytest.approx(4 / 15)
    assert meta["e2e_latency"] > 0
    assert engine.seen[-1].sampling.max_tokens == 128


async def test_streamed_text_is_cumulative(serve, events):
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 50, "temperature": 0}, "stream": True, "rid": "mine"}
    async with serve(FakeEngine()) as client:
        chunks = await events(await client.post("/generate", json=body))
    assert [chunk["text"] for chunk in chunks] == ["a", "abcd", "abcde", "abcdefgh"]
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 4, 5, 8]
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * 3
    assert "spec_verify_ct" not in chunks[0]["meta_info"]
    assert chunks[-1]["meta_info"]["spec_verify_ct"] == 3
    assert {chunk["meta_info"]["id"] for chunk in chunks} == {"mine"}


async def test_a_list_of_prompts_is_answered_by_a_list(serve, events):
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}
    async with serve(FakeEngine()) as client:
        rows = await (await client.post("/generate", json=body)).json()
        chunks = await events(await client.post("/generate", json=body | {"stream": True}))
    assert [row["text"] for row in rows] == ["ab", "ab"]
    assert {chunk["index"] for chunk in chunks} == {0, 1}


async def test_what_sglangs_benchmark_sends_is_taken(serve):
    body = {
        "text": "hello",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
        "stream": False,
        "lora_path": "",
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    async with serve(FakeEngine()) as client:
        answer = await (await client.post("/generate", json=body)).json()
    assert "ignored_fields" not in answer["meta_info"]


async def test_output_logprobs(serve):
    body = {"text": "a", "return_logprob": True, "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 1}}
    async with serve(FakeEngine()) as client:
        meta = (await (await client.post("/generate", json=body)).json())["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, None]]
    assert meta["output_top_logprobs"] == [[[-0.5, 97, None]]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "a", "temperature": 0}, "temperature"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_refusals_name_the_field(serve, body, param):
    async with serve(FakeEngine()) as client:
        response = await client.post("/generate", json=body)
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
