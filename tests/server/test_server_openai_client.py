"""The official openai client, unmodified, against the server."""

import pytest
from fake_engine import FakeEngine

openai = pytest.importorskip("openai")


def client_of(client, key="none"):
    return openai.AsyncOpenAI(base_url=str(client.make_url("/v1")), api_key=key, max_retries=0)


async def test_completions_chat_streams_and_models(serve):
    async with serve(FakeEngine()) as server, client_of(server) as client:
        models = await client.models.list()
        name = models.data[0].id
        done = await client.completions.create(model=name, prompt="x", max_tokens=20, logprobs=1, extra_body={"ignore_eos": True})
        assert done.choices[0].text == "abcdefgh"
        assert done.choices[0].logprobs.tokens[0] == "a"
        assert done.usage.completion_tokens == 8
        stream = await client.completions.create(model=name, prompt="x", stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abcdefgh"
        assert chunks[-1].usage.completion_tokens == 8
        messages = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model=name, messages=messages, logprobs=True, top_logprobs=2, seed=3)
        assert chat.choices[0].message.content == "abcdefgh"
        assert chat.choices[0].logprobs.content[0].top_logprobs[1].logprob == -9999.0
        assert chat.meta_info["spec_verify_ct"] == 3
        stream = await client.chat.completions.create(model=name, messages=messages, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abcdefgh"
        assert chunks[-1].choices[0].finish_reason == "stop"


async def test_errors_become_the_clients_own(serve):
    async with serve(FakeEngine(), api_key="k") as server:
        async with client_of(server, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(server, "k") as client:
            with pytest.raises(openai.BadRequestError, match="n is not supported") as caught:
                await client.completions.create(model="fake-model", prompt="x", n=2)
            assert caught.value.param == "n"
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="gpt-x", prompt="x")


async def test_an_error_in_a_stream_raises(serve):
    engine = FakeEngine(["a"] * 1000, round_s=0.005)
    async with serve(engine) as server, client_of(server) as client:
        engine.fail_at_step = engine.num_steps + 3
        stream = await client.completions.create(model="fake-model", prompt="x", max_tokens=100, stream=True)
        with pytest.raises(openai.APIError, match="rank 1 died"):
            async for _ in stream:
                pass
