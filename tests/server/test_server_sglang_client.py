"""`sglang.bench_serving`, unmodified, against the server."""

import json

import pytest
from server_process import serving, write_checkpoints
from sglang_client import NotInstallable, bench_serving, install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def client():
    try:
        return install()
    except NotInstallable as error:
        pytest.skip(f"sglang's client cannot be installed here: {error}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang")
    with serving(write_checkpoints(folder / "pair"), folder / "log", "--mode", "tree", "--node-budget", "7") as served:
        yield served


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"])
def test_bench_serving_reads_our_answers(client, server, tmp_path, backend):
    before = server.metric("sglang:spec_verify_calls_total"), server.metric("sglang:generation_tokens_total")
    arguments = [
        *("--backend", backend, "--base-url", server.url, "--dataset-name", "random-ids", "--seed", "1"),
        *("--random-input-len", "20", "--random-output-len", "16", "--num-prompts", "6", "--max-concurrency", "3"),
        *("--output-file", str(tmp_path / "out.jsonl"), "--output-details"),
    ]
    done = bench_serving(client, arguments, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "out.jsonl").read_text())
    assert result["completed"] == 6, result["errors"]
    assert result["errors"] == [""] * 6
    assert result["total_output_tokens"] == sum(result["output_lens"])
    assert result["mean_ttft_ms"] > 0
    generated = server.metric("sglang:generation_tokens_total") - before[1]
    assert generated > result["total_output_tokens"], "its own warm-up request comes on top"
    if backend.startswith("sglang"):
        assert result["accept_length"] == pytest.approx(
            server.get("/server_info")["internal_states"][0]["avg_spec_accept_length"]
        )
    assert server.metric("sglang:spec_verify_calls_total") > before[0]
