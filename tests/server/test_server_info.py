"""/metrics, /server_info, /v1/models and their kin."""

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from ddtree_bench.config import TreeSetting


async def scrape(client):
    text = await (await client.get("/metrics")).text()
    return {
        (sample.name, sample.labels.get("position") or sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_counters_are_zero_at_the_start_and_there(serve):
    async with serve(FakeEngine()) as client:
        values = await scrape(client)
    for name in (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:spec_verify_calls_total",
        "sglang:generation_tokens_total",
        "sglang:spec_accept_length",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "ddtree:preemptions_total",
    ):
        assert values[name, None] == 0, name
    positions = [key[1] for key in values if key[0] == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert positions == ["0", "1", "2", "3", "4"], "depth is capped by the node budget of 5"
    assert values["ddtree:kv_pages_free", None] == values["ddtree:kv_pages_total", None] == 64


async def test_counters_after_requests_whole_streamed_and_cut(serve, events):
    async with serve(FakeEngine()) as client:
        await client.post("/v1/completions", json={"prompt": "xyz"})
        await events(await client.post("/v1/completions", json={"prompt": "xyz", "stream": True}))
        await client.post("/v1/completions", json={"prompt": "xyz", "max_tokens": 3})
        values = await scrape(client)
    assert values["vllm:prompt_tokens_total", None] == 9
    assert values["vllm:generation_tokens_total", None] == values["sglang:generation_tokens_total", None] == 19
    assert values["vllm:spec_decode_num_drafts_total", None] == values["sglang:spec_verify_calls_total", None] == 7
    assert values["vllm:spec_decode_num_draft_tokens_total", None] == 35
    assert values["vllm:spec_decode_num_accepted_tokens_total", None] == 10
    per_position = [values["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(5)]
    assert per_position == [5, 5, 0, 0, 0]
    assert sum(per_position) == 10
    assert values["sglang:spec_accept_length", None] == pytest.approx(1 + 10 / 7)
    assert values["ddtree:cut_tokens_total", None] == 1
    assert values["vllm:request_success_total", "stop"] == 2
    assert values["vllm:request_success_total", "length"] == 1
    tokens = 3 + 10 + 7 - 1
    assert values["vllm:generation_tokens_total", None] == tokens


async def test_plain_decoding_proposes_no_drafts(serve):
    async with serve(FakeEngine(["a", "b"], num_draft=0), tree=TreeSetting(mode="plain")) as client:
        answer = await (await client.post("/v1/completions", json={"prompt": "x"})).json()
        values = await scrape(client)
        info = await (await client.get("/server_info")).json()
    assert values["vllm:spec_decode_num_drafts_total", None] == 0
    assert values["sglang:spec_verify_calls_total", None] == 0
    assert values["sglang:spec_accept_length", None] == 0
    assert values["ddtree:verify_steps_total", None] == 1
    assert answer["meta_info"]["spec_verify_ct"] == 1
    assert "spec_accept_length" not in answer["meta_info"]
    assert info["speculative_algorithm"] is None
    assert info["ddtree"]["mode"] == "plain"
    assert info["ddtree"]["node_budget"] is None
    assert info["ddtree"]["verify_width"] == 1


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_tells_the_effective_setting(serve, path):
    tree = TreeSetting(mode="tree", block_size=8, top_k=99, node_budget=5, draft_temperature=0.6)
    async with serve(FakeEngine(), tree=tree) as client:
        before = await (await client.get(path)).json()
        await client.post("/v1/completions", json={"prompt": "x"})
        after = await (await client.get(path)).json()
    assert "avg_spec_accept_length" not in before["internal_states"][0], "unknown is not 0"
    assert after["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(1 + 4 / 3)
    assert after["speculative_num_draft_tokens"] == 6
    assert after["speculative_dflash_block_size"] == 8
    assert after["tp_size"] == 1
    block = after["ddtree"]
    assert (block["mode"], block["top_k"], block["depth"], block["node_budget"], block["verify_width"]) == ("tree", 5, 5, 5, 6)
    assert block["draft_temperature"] == 0.6
    assert block["full_context_requests"] == 64 // ((200 + 6 + 15) // 16)
    assert block["asked"]["top_k"] == 99
    assert block["stats"]["num_total_pages"] == 64
    assert block["noise_keyed_by_position"] is True
    assert after["status"] == "ready"


async def test_models_and_model_info(serve):
    async with serve(FakeEngine()) as client:
        models = await (await client.get("/v1/models")).json()
        infos = [await (await client.get(path)).json() for path in ("/model_info", "/get_model_info")]
        one = await (await client.get("/v1/models/fake-model")).json()
        assert (await client.get("/v1/models/other")).status == 404
        flushed = [(await client.get("/flush_cache")).status, (await client.post("/flush_cache")).status]
    assert models["data"][0]["id"] == "fake-model"
    assert models["data"][0]["max_model_len"] == 200
    assert one == models["data"][0]
    assert infos[0] == infos[1]
    assert infos[0]["model_path"] == "/models/fake-model"
    assert flushed == [200, 200]
