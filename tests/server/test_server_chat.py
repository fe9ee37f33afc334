"""POST /v1/chat/completions: template, chunk shapes, logprobs."""

import pytest
from fake_engine import FakeEngine

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
BODY = {"model": "fake-model", "messages": MESSAGES}


async def test_whole_answer_and_default_length(serve, model):
    engine = FakeEngine()
    async with serve(engine) as client:
        answer = await (await client.post("/v1/chat/completions", json=BODY)).json()
    prompt = engine.seen[-1].prompt_tokens
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abcdefgh", "refusal": None}
    assert model.tokenizer.decode(prompt) == "<system>be brief\n<user>hi\n<assistant>"
    assert engine.seen[-1].sampling.max_tokens == model.max_context - len(prompt), "the room that is left"
    assert answer["meta_info"]["spec_verify_ct"] == 3


async def test_role_comes_with_the_first_content(serve, events):
    async with serve(FakeEngine()) as client:
        chunks = await events(await client.post("/v1/chat/completions", json=BODY | {"stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "bcd"}, {"content": "e"}, {"content": "fgh"}]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_usage_is_streamed_when_asked_for(serve, events):
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 4}
    async with serve(FakeEngine()) as client:
        chunks = await events(await client.post("/v1/chat/completions", json=body))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_logprobs(serve, events):
    body = BODY | {"logprobs": True, "top_logprobs": 1, "max_tokens": 2}
    async with serve(FakeEngine()) as client:
        answer = await (await client.post("/v1/chat/completions", json=body)).json()
        chunks = await events(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    row = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert answer["choices"][0]["logprobs"]["content"][0] == row | {"top_logprobs": [row]}
    streamed = [item["token"] for chunk in chunks for item in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "refused", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_refusals_name_the_field(serve, fields, param):
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/chat/completions", json=BODY | fields)
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
