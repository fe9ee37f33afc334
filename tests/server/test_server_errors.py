"""Errors: shape, status, and that every bad field is named with what was given."""

import threading

import pytest
from fake_engine import FakeEngine

from ddtree_bench.server import generation

OK = {"prompt": "x", "max_tokens": 4}

BAD_FIELDS = {
    "n": 2,
    "best_of": 3,
    "logit_bias": {"5": 1},
    "echo": True,
    "suffix": "end",
    "response_format": {"type": "json_schema"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "structured_outputs": {"choice": ["a"]},
    "grammar": "root ::= x",
    "min_tokens": 3,
    "bad_words": ["x"],
    "use_beam_search": True,
    "prompt_logprobs": 1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "top_logprobs": 2,
    "temperature": -1,
    "top_p": 0,
    "top_k": -2,
    "min_p": 1.5,
    "repetition_penalty": 0,
    "presence_penalty": 3,
    "frequency_penalty": "high",
    "seed": -1,
    "max_tokens": 0,
    "stop": ["a", ""],
    "stop_token_ids": [5000],
    "ignore_eos": "yes",
    "logprobs": 21,
    "stream": 1,
    "stream_options": {"include_usage": True},
    "prompt": None,
    "model": "another",
}


@pytest.mark.parametrize("name", BAD_FIELDS)
async def test_a_bad_field_is_refused_by_name(serve, name):
    engine = FakeEngine()
    async with serve(engine) as client:
        num_seen = len(engine.seen)
        response = await client.post("/v1/completions", json=OK | {name: BAD_FIELDS[name]})
        error = (await response.json())["error"]
        assert len(engine.seen) == num_seen
    assert response.status == (404 if name == "model" else 400)
    assert error["param"] == name
    assert name in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "prompt",
    ["", [], [1, 2000], [-1], [True], [[1], []], 5, {"a": 1}, ["a", 5], "\ud800"],
    ids=["empty", "no-ids", "id-too-big", "id-negative", "bool", "empty-second", "number", "object", "mixed", "half-surrogate"],
)
async def test_a_bad_prompt_is_refused(serve, prompt):
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/completions", json={"prompt": prompt})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        ({"prompt": [1] * 50, "max_tokens": 151}, ("50", "151", "200")),
        ({"prompt": [1] * 200, "max_tokens": 1}, ("200", "1", "201")),
    ],
    ids=["answer-too-long", "prompt-fills-the-context"],
)
async def test_context_length_is_checked_and_named(serve, body, lengths):
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/completions", json=body)
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["code"] == "context_length_exceeded"
    assert all(length in error["message"] for length in lengths)


async def test_a_request_that_just_fits_is_taken(serve):
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/completions", json={"prompt": [1] * 50, "max_tokens": 150})
        assert response.status == 200


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_what_the_engine_refuses_is_a_400(serve, is_stream):
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/completions", json={"prompt": [1] * 101, "max_tokens": 1, "stream": is_stream})
        assert response.status == 400
        assert "101" in (await response.json())["error"]["message"]
        assert client.state.engine.open_requests == ()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}', b"[" * 100_000],
    ids=["empty", "torn", "list", "not-utf8", "nan", "deep"],
)
async def test_malformed_bodies(serve, body):
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/completions", data=body)
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_not_as_its_headers_tell_is_a_400(serve):
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/completions", data=b'{"prompt": "x"}', headers={"Content-Encoding": "gzip"})
        assert response.status == 400
        assert "Content-Encoding" in (await response.json())["error"]["message"]


async def test_a_long_prompt_is_read_beside_the_other_clients(serve, monkeypatch):
    threads = []
    parse = generation.parse_completions
    monkeypatch.setattr(
        generation, "parse_completions", lambda *given: threads.append(threading.current_thread()) or parse(*given)
    )
    async with serve(FakeEngine()) as client:
        assert (await client.post("/v1/completions", json=OK)).status == 200
        response = await client.post("/v1/completions", json=OK | {"prompt": "x" * generation.LONG_BODY_BYTES})
        assert (await response.json())["error"]["code"] == "context_length_exceeded"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_wrong_method_path_and_size_are_json(serve):
    async with serve(FakeEngine()) as client:
        wrong_method = await client.get("/v1/completions")
        wrong_path = await client.get("/v1/nothing")
        too_big = await client.post("/v1/completions", data=b"x" * (17 * 1024 * 1024))
        for response, status in ((wrong_method, 405), (wrong_path, 404), (too_big, 413)):
            assert response.status == status
            assert (await response.json())["error"]["message"]
    assert wrong_method.headers["Allow"] == "POST"


async def test_api_key(serve):
    async with serve(FakeEngine(), api_key="sesame") as client:
        for path in ("/v1/models", "/server_info"):
            response = await client.get(path)
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        wrong = await client.post("/v1/completions", json=OK, headers={"Authorization": "Bearer no"})
        right = await client.post("/v1/completions", json=OK, headers={"Authorization": "Bearer sesame"})
        assert (wrong.status, right.status) == (401, 200)
        assert (await client.get("/health")).status == 200
        assert (await client.get("/metrics")).status == 200


async def test_a_failed_request_is_a_500_or_an_error_event(serve, events):
    engine = FakeEngine()
    engine.fail_request = "bad"
    async with serve(engine) as client:
        whole = await client.post("/v1/completions", json=OK | {"rid": "bad"})
        assert whole.status == 500
        assert "not finite" in (await whole.json())["error"]["message"]
        chunks = await events(await client.post("/v1/completions", json=OK | {"rid": "bad", "stream": True}))
        assert chunks[0]["choices"][0]["text"] == "a"
        assert "not finite" in chunks[-1]["error"]["message"]
        assert (await client.get("/health")).status == 200
