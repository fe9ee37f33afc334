"""The server as a process over the real engine: pages, stopping, killing, and what the flags refuse."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time

import aiohttp
import psutil
import pytest
from server_process import command, serving, started, wait_until, write_checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return write_checkpoints(tmp_path_factory.mktemp("server") / "pair")


async def read_first_chunk_and_leave(session, url, number):
    body = {"prompt": f"client {number} " * 4, "max_tokens": 600, "ignore_eos": True, "stream": True, "temperature": 0.8}
    response = await session.post(url + "/v1/completions", json=body)
    assert response.status == 200, await response.text()
    await response.content.readuntil(b"\n\n")
    response.close()


def test_200_clients_that_leave_give_all_pages_back(checkpoints, tmp_path):
    async def leave(url):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(read_first_chunk_and_leave(session, url, number) for number in range(200)))

    with serving(checkpoints, tmp_path / "log", "--mode", "tree", "--node-budget", "7", "--page-size", "4") as served:
        free = served.metric("ddtree:kv_pages_free")
        assert free == served.metric("ddtree:kv_pages_total")
        asyncio.run(leave(served.url))
        assert wait_until(lambda: served.metric("ddtree:kv_pages_free") == free, 30)
        assert served.metric("sglang:num_running_reqs") == served.metric("sglang:num_queue_reqs") == 0
        answer = served.post("/v1/completions", {"prompt": "still there", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4


def test_modes_give_the_same_text_and_counts_that_add_up(checkpoints, tmp_path):
    body = {"prompt": "the same text", "max_tokens": 60, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    flags = {"plain": (), "linear": ("--block-size", "4"), "tree": ("--node-budget", "6", "--top-k", "3")}
    texts = {}
    for mode, more in flags.items():
        with serving(checkpoints, tmp_path / f"{mode}.log", "--mode", mode, *more) as served:
            answer = served.post("/v1/completions", body)
            texts[mode] = answer["choices"][0]["text"]
            meta, info = answer["meta_info"], served.get("/server_info")["ddtree"]
            walked = 1 + meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] - meta["num_cut"]
            assert meta["completion_tokens"] == walked == 60
            assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
            assert (info["mode"], info["verify_width"]) == (mode, {"plain": 1, "linear": 4, "tree": 7}[mode])
    assert texts["plain"] == texts["linear"] == texts["tree"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_cleanly_in_the_middle_of_requests(checkpoints, tmp_path, number):
    async def stream_until_the_end(url, stop):
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
            response = await session.post(url + "/v1/completions", json=body)
            await response.content.readuntil(b"\n\n")
            stop()
            return (await response.content.read()).decode()

    with serving(checkpoints, tmp_path / "log", "--mode", "tree", "--tensor-parallel", "2") as served:
        ranks = psutil.Process(served.process.pid).children(recursive=True)
        assert ranks
        began = time.monotonic()
        text = asyncio.run(stream_until_the_end(served.url, lambda: served.process.send_signal(number)))
        assert served.process.wait(20) == 0
        assert time.monotonic() - began < 10
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    last = text.strip().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"


def test_a_signal_while_loading_is_a_clean_end(checkpoints, tmp_path):
    for wait_s in (0.3, 1.0, 1.6):
        with started(checkpoints, tmp_path / "log", "--tensor-parallel", "2") as served:
            time.sleep(wait_s)
            children = psutil.Process(served.process.pid).children(recursive=True)
            served.process.terminate()
            assert served.process.wait(20) in (0, -signal.SIGTERM), (tmp_path / "log").read_text()
            assert wait_until(lambda left=children: not any(child.is_running() for child in left), 10)


def test_a_killed_parent_leaves_no_rank(checkpoints, tmp_path):
    with serving(checkpoints, tmp_path / "log", "--tensor-parallel", "2") as served:
        ranks = psutil.Process(served.process.pid).children(recursive=True)
        assert ranks
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait()
        assert wait_until(lambda: not any(rank.is_running() for rank in ranks), 10)


def test_a_killed_rank_fails_requests_and_health(checkpoints, tmp_path):
    with serving(checkpoints, tmp_path / "log", "--tensor-parallel", "2") as served:
        psutil.Process(served.process.pid).children()[0].kill()

        def health():
            done = subprocess.run(["curl", "-s", served.url + "/health"], capture_output=True, text=True, check=False)
            return json.loads(done.stdout)

        assert wait_until(lambda: health()["status"] == "unavailable", 20)
        assert "rank 1" in health()["reason"]
        served.process.terminate()
        assert served.process.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--block-size", "32"), ("--block-size", "at most 8", "32")),
        (("--device", "cuda"), ("--device cuda", "torch sees 0")),
        (("--tensor-parallel", "3"), ("3",)),
        (("--model", "/nothing/here"), ("/nothing/here",)),
        (("--node-budget", "-1"), ("node_budget", "-1")),
        (("--mode", "beam"), ("beam", "plain", "linear", "tree")),
        (("--max-total-tokens", "16"), ("max_total_tokens",)),
        (("--max-total-tokens", str(10**13)), ("max_total_tokens must fit into the free memory",)),
        (("--tensor-parallel", "2", "--max-context", "5000"), ("max_context must be at most 1024",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and value[0].startswith("--") else None,
)
def test_what_cannot_be_is_refused_before_it_serves(checkpoints, flags, words):
    done = subprocess.run(command(checkpoints, *flags), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2)  # an abort of the process group's threads would be 134
    assert done.stdout == ""
    assert all(word in done.stderr for word in words), done.stderr
    own_lines = [line for line in done.stderr.splitlines() if not line.startswith("[rank")]  # other ranks' tracebacks
    assert not any("Traceback" in line for line in own_lines)
    assert any(line.lower().startswith("error: ") for line in own_lines)


def test_a_port_that_is_taken_is_named(checkpoints):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(command(checkpoints, "--port", port), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
