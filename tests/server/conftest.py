"""A server over the fake engine, in this process, with the runner's settings that the real one has."""

import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from fake_engine import VOCAB_SIZE, FakeEngine, FakeTokenizer

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.server.app import generate_probe, make_app
from ddtree_bench.server.bridge import EngineBridge
from ddtree_bench.server.metrics import Counters
from ddtree_bench.server.protocol import ServedModel
from ddtree_bench.server.state import STATE

TREE = TreeSetting(mode="tree", block_size=8, top_k=4, node_budget=5)


@pytest.fixture
def model():
    return ServedModel(
        model_id="fake-model",
        model_path="/models/fake-model",
        tokenizer=FakeTokenizer(),
        max_context=200,
        vocab_size=VOCAB_SIZE,
    )


@pytest.fixture
def serve(model):
    """`async with serve(engine) as client`: a ready server; `client.state` and `client.engine` are at hand."""

    @asynccontextmanager
    async def start(engine: FakeEngine, *, tree: TreeSetting = TREE, api_key=None, is_ready=True):
        counters = Counters()
        bridge = EngineBridge(engine.launch, counters.observe)
        app = make_app(EngineSettings(model="fake-model", tree=tree), model, bridge, counters, api_key)
        server = TestServer(app)
        client = TestClient(server)
        await client.start_server()
        client.state, client.engine = app[STATE], engine
        if is_ready:
            await bridge.start()
            await generate_probe(app[STATE])
        try:
            yield client
        finally:
            await client.close()
            assert await bridge.stop(5)
            assert engine.is_closed or not is_ready

    return start


@pytest.fixture
def events():
    """Read a whole event stream: the JSON values of its events, [DONE] last and left out."""

    async def read(response):
        import json

        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        blocks = (await response.text()).split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]

    return read
