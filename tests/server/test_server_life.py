"""Health, abort, disconnects, an engine that fails, stopping."""

import asyncio

import aiohttp
import pytest
from fake_engine import FakeEngine

from ddtree_bench.engine.request import GenerationRequest
from ddtree_bench.server.bridge import EngineBridge
from ddtree_bench.server.errors import EngineUnavailable

LONG = ["a"] * 10_000
BODY = {"prompt": "x", "max_tokens": 150}


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_health_needs_a_generation(serve):
    engine = FakeEngine()
    async with serve(engine, is_ready=False) as client:
        loading = await client.get("/health")
        assert loading.status == 503
        assert "loading" in (await loading.json())["reason"]
        assert (await client.post("/v1/completions", json=BODY)).status == 503
        await client.state.engine.start()
        assert (await client.get("/health")).status == 503
        assert (await client.get("/health_generate")).status == 200
        assert (await client.get("/health")).status == 200
        assert engine.num_steps >= 2, "one prefill and one round"


async def test_200_clients_that_leave_after_the_first_chunk(serve):
    engine = FakeEngine(LONG, round_s=0.001, num_pages=300)
    async with serve(engine) as client:
        free = client.state.engine.stats().num_free_pages

        url = client.make_url("/v1/completions")

        async def read_one_chunk_and_leave(session):
            response = await session.post(url, json=BODY | {"stream": True})
            await response.content.readuntil(b"\n\n")
            response.close()

        engine.gate.clear()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [asyncio.create_task(read_one_chunk_and_leave(session)) for _ in range(200)]
            await until(lambda: len(client.state.engine.open_requests) == 200)
            engine.gate.set()
            await asyncio.gather(*tasks)
        await until(lambda: not client.state.engine.open_requests)
        assert len(engine.aborted) == 200
        assert engine.sequences == {}
        assert client.state.engine.stats().num_free_pages == free
        assert (await client.post("/v1/completions", json=BODY | {"max_tokens": 2})).status == 200


async def test_a_client_that_leaves_an_unstreamed_request(serve):
    engine = FakeEngine(LONG, round_s=0.01)
    async with serve(engine) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.post("/v1/completions", json=BODY), 0.1)
        await until(lambda: engine.aborted != [])
        await until(lambda: not client.state.engine.open_requests)


@pytest.mark.parametrize("path", ["/abort", "/abort_request"])
async def test_abort_by_rid(serve, events, path):
    engine = FakeEngine(LONG, round_s=0.01)
    async with serve(engine) as client:
        stream = await client.post("/generate", json={"text": "x", "stream": True, "rid": "r1"})
        assert (await (await client.post(path, json={"rid": "other"})).json()) == {"aborted": []}
        assert (await (await client.post(path, json={"rid": "r1"})).json()) == {"aborted": ["r1"]}
        chunks = await events(stream)
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert engine.aborted == ["r1"]
        assert (await client.post(path, json={})).status == 400


async def test_abort_of_a_list_of_prompts_and_of_all(serve):
    engine = FakeEngine(LONG, round_s=0.01)
    async with serve(engine) as client:
        batch = asyncio.create_task(client.post("/v1/completions", json=BODY | {"prompt": ["a", "b"], "rid": "r"}))
        await until(lambda: len(client.state.engine.open_requests) == 2)
        assert (await (await client.post("/abort", json={"rid": "r"})).json()) == {"aborted": ["r-0", "r-1"]}
        answer = await (await batch).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
        other = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: client.state.engine.open_requests)
        await client.post("/abort", json={"abort_all": True})
        assert (await (await other).json())["choices"][0]["finish_reason"] == "abort"


async def test_a_rid_in_use_is_refused(serve):
    engine = FakeEngine(LONG, round_s=0.01)
    async with serve(engine) as client:
        first = await client.post("/v1/completions", json=BODY | {"rid": "same", "stream": True})
        second = await client.post("/v1/completions", json=BODY | {"rid": "same"})
        assert (second.status, (await second.json())["error"]["param"]) == (400, "rid")
        first.close()


async def test_an_engine_that_fails_ends_all_requests_and_health(serve, events):
    engine = FakeEngine(LONG, round_s=0.01)
    async with serve(engine) as client:
        stream = await client.post("/v1/completions", json=BODY | {"stream": True})
        whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: len(client.state.engine.open_requests) == 2)
        engine.fail_at_step = engine.num_steps + 2
        chunks = await events(stream)
        assert "rank 1 died" in chunks[-1]["error"]["message"]
        assert chunks[-1]["error"]["code"] == "engine_failed"
        assert (await whole).status == 503
        health = await client.get("/health")
        assert health.status == 503
        assert "rank 1 died" in (await health.json())["reason"]
        assert (await client.post("/v1/completions", json=BODY)).status == 503
        assert (await client.get("/metrics")).status == 200


async def test_stopping_ends_requests_and_closes_the_engine():
    engine = FakeEngine(LONG, round_s=0.01)
    bridge = EngineBridge(engine.launch)
    await bridge.start()
    running = bridge.open([GenerationRequest(request_id="r", prompt_tokens=(1,))])
    assert await bridge.stop(5)
    with pytest.raises(EngineUnavailable, match="stopping"):
        async for _ in running.updates():
            pass
    assert engine.is_closed
    with pytest.raises(EngineUnavailable):
        bridge.open([GenerationRequest(request_id="s", prompt_tokens=(1,))])


async def test_a_launch_that_fails_is_raised():
    def launch(on_updates, on_failure):
        raise ValueError("model must be a folder; given 'x'")

    bridge = EngineBridge(launch)
    with pytest.raises(ValueError, match="must be a folder"):
        await bridge.start()
    with pytest.raises(EngineUnavailable):
        bridge.open([])
