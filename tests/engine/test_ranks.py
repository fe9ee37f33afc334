"""Tensor-parallel ranks: the same tokens as one rank, and no hang when one diverges or dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_support import PLAIN, engine_of, outputs, prompt_of, request_of, settings_of, tokens_of, write_pair
from oracle_worker import CHANGES, make_engine

from ddtree_bench.config import TreeSetting
from ddtree_bench.engine import round as round_module
from ddtree_bench.engine.handle import EngineHandle, launch
from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate
from ddtree_bench.errors import ServerError

WORKER = (sys.executable, str(Path(__file__).with_name("oracle_worker.py")))
PROMPTS = {f"r{i}": prompt_of(i, 4 + 5 * i) for i in range(5)}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "r0": {},
    "r1": {"temperature": 1.0, "seed": 1},
    "r2": {"temperature": 0.9, "seed": 2, "top_p": 0.7, "logprobs": 2},
    "r3": {"temperature": 1.1, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4, "top_k": 9},
    "r4": {"frequency_penalty": 0.8},
}
REQUESTS = [request_of(name, PROMPTS[name], max_tokens=24, **SAMPLINGS[name]) for name in PROMPTS]


class Collector:
    """Gather updates and wait for ends."""

    def __init__(self) -> None:
        self.updates: dict[str, list[GenerationUpdate]] = {}
        self.changed = threading.Condition()

    def __call__(self, updates: Sequence[GenerationUpdate]) -> None:
        with self.changed:
            for update in updates:
                self.updates.setdefault(update.request_id, []).append(update)
            self.changed.notify_all()

    def ends(self, names: Sequence[str], timeout_s: float = 120) -> dict[str, GenerationUpdate]:
        def are_done() -> bool:
            return all(name in self.updates and self.updates[name][-1].finish_reason for name in names)

        with self.changed:
            assert self.changed.wait_for(are_done, timeout_s), "every request must end"
            return {name: self.updates[name][-1] for name in names}


def run(handle: EngineHandle, collector: Collector, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    for request in requests:
        handle.submit(request)
    names = [request.request_id for request in requests]
    collector.ends(names)
    return {name: tokens_of(collector.updates.pop(name)) for name in names}


def start(
    pair: Path, changes_file: Path, changes: dict[str, Any], setting: TreeSetting, **more: Any
) -> tuple[EngineHandle, Collector]:
    changes_file.write_text(json.dumps(changes))
    collector = Collector()
    settings = settings_of(pair, setting, threads=1, **more)
    return launch(settings, collector, worker_command=WORKER, make_engine=make_engine), collector


@pytest.fixture
def changes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CHANGES, str(tmp_path / "changes.json"))
    return tmp_path / "changes.json"


def is_running(process: psutil.Process) -> bool:
    """A dead process whose parent has not asked about it is still listed, as a zombie."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def is_rank(process: psutil.Process) -> bool:
    """Other tests leave helpers of multiprocessing behind; those are no ranks."""
    try:
        return "multiprocessing" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def check_no_rank_is_left() -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(is_running(child) and is_rank(child) for child in psutil.Process().children(recursive=True)):
            return
        time.sleep(0.05)
    raise AssertionError("no rank may outlive its server")


def compare_with_plain(
    pair: Path, changes_file: Path, settings: Sequence[TreeSetting], tensor_parallel: int, **more: Any
) -> dict[str, list[int]]:
    handle, collector = start(pair, changes_file, {}, PLAIN, tensor_parallel=tensor_parallel, **more)
    plain = run(handle, collector, REQUESTS)
    handle.close()
    changes = {"prompts": PROMPTS, "answers": plain, "hit_rate": 0.7}
    for setting in settings:
        handle, collector = start(pair, changes_file, changes, setting, tensor_parallel=tensor_parallel, **more)
        assert run(handle, collector, REQUESTS[:1]) == {"r0": plain["r0"]}
        assert run(handle, collector, REQUESTS) == plain
        stats = handle.stats()
        assert stats.num_accepted > stats.num_verify_steps / 4
        assert stats.num_free_pages == stats.num_total_pages
        handle.close()
    check_no_rank_is_left()
    return plain


def test_a_launched_single_rank_gives_the_engines_tokens(pair: Path, changes_file: Path) -> None:
    plain = compare_with_plain(pair, changes_file, [TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)], 1)
    assert plain == outputs(engine_of(pair), REQUESTS)


def test_two_ranks_give_the_tokens_of_plain_decoding(pair: Path, changes_file: Path) -> None:
    setting = TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)
    plain = compare_with_plain(pair, changes_file, [setting], 2)
    assert plain == outputs(engine_of(pair), REQUESTS)


@pytest.mark.slow
def test_eight_launched_ranks_give_the_tokens_of_plain_decoding(pair: Path, changes_file: Path) -> None:
    """One setting of each mode and every kind of sampling; the grid of settings is in `test_degrees`."""
    settings = [TreeSetting(mode="tree", block_size=16, node_budget=63, top_k=4), TreeSetting(mode="linear", block_size=8)]
    plain = compare_with_plain(pair, changes_file, settings, 8)
    assert plain == outputs(engine_of(pair), REQUESTS)


@pytest.mark.slow
def test_fewer_kv_heads_than_ranks_and_a_padded_vocabulary_are_lossless(tmp_path: Path, changes_file: Path) -> None:
    odd = write_pair(tmp_path / "odd", vocab_size=97, num_key_value_heads=2)
    setting = TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)
    plain = compare_with_plain(odd, changes_file, [setting], 4)
    assert plain == outputs(engine_of(odd), REQUESTS)


def test_ranks_that_diverge_stop_with_an_error_that_names_the_round(pair: Path, changes_file: Path) -> None:
    original = round_module.choose_tokens
    setting = TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)
    changes = {"diverging_rank": 1, "diverging_round": 4}
    handle, collector = start(pair, changes_file, changes, setting, tensor_parallel=2)
    handle.submit(REQUESTS[0])
    handle.submit(REQUESTS[1])
    for end in collector.ends(["r0", "r1"], timeout_s=30).values():
        assert end.finish_reason == "error"
        assert end.error is not None
        assert "in round 5 ranks [1] differ from rank 0" in end.error
    with pytest.raises(ServerError, match="RanksDisagreeError"):
        handle.submit(REQUESTS[2])
    handle.close()
    check_no_rank_is_left()
    assert round_module.choose_tokens is original, "only rank 1 was changed"


@pytest.mark.parametrize("noise", [None, 0.5], ids=["one-ulp", "half-a-logit"])
def test_ranks_take_the_same_walk_although_one_of_them_computes_other_logits(
    pair: Path, changes_file: Path, noise: float | None
) -> None:
    """Every choice is made from what the ranks have exchanged, so a rank that rounds differently can never walk alone."""
    plain = outputs(engine_of(pair), REQUESTS)
    setting = TreeSetting(mode="tree", block_size=8, node_budget=15, top_k=4)
    changes = {"prompts": PROMPTS, "answers": plain, "hit_rate": 0.7, "noisy_rank": 1, "noise": noise}
    handle, collector = start(pair, changes_file, changes, setting, tensor_parallel=2)
    tokens = run(handle, collector, REQUESTS)
    assert {name: len(each) for name, each in tokens.items()} == dict.fromkeys(PROMPTS, 24), "no rank disagreed, none hung"
    assert (tokens == plain) == (noise is None), "one rounding step changes no choice here; half a logit does"
    handle.close()
    check_no_rank_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_killed_rank_fails_all_requests_within_seconds(pair: Path, changes_file: Path, is_busy: bool) -> None:
    handle, collector = start(pair, changes_file, {}, PLAIN, tensor_parallel=2, max_running_requests=2)
    if is_busy:
        for request in REQUESTS:
            handle.submit(request_of(request.request_id, request.prompt_tokens, max_tokens=200))
        time.sleep(0.3)
    (child,) = [child for child in psutil.Process().children() if is_rank(child)]
    os.kill(child.pid, signal.SIGKILL)
    if is_busy:
        for end in collector.ends(list(PROMPTS), timeout_s=10).values():
            assert end.finish_reason == "error"
            assert "rank 1" in (end.error or "")
            assert "SIGKILL" in (end.error or "")
    deadline = time.monotonic() + 10
    while handle.error is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ServerError, match=r"rank 1 .* was killed by SIGKILL"):
        handle.submit(request_of("later", [1]))
    handle.close()
    check_no_rank_is_left()


@pytest.mark.slow
def test_ranks_end_with_a_killed_server(pair: Path, tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from engine_support import PLAIN, request_of, settings_of
from ddtree_bench.engine.handle import launch
handle = launch(settings_of(Path({str(pair)!r}), PLAIN, tensor_parallel=4, threads=1), lambda updates: None)
handle.submit(request_of("r", [1], max_tokens=250))
print("ready", flush=True)
time.sleep(60)
"""
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    ranks = psutil.Process(server.pid).children()
    assert len(ranks) == 3
    server.kill()
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 5
    while any(is_running(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(rank) for rank in ranks)


def test_a_rank_that_cannot_start_is_reported(pair: Path) -> None:
    with pytest.raises(ServerError, match=r"rank 1 .* exited with code 3"):
        launch(
            settings_of(pair, PLAIN, tensor_parallel=2),
            lambda updates: None,
            worker_command=(sys.executable, "-c", "import sys; sys.exit(3)"),
        )
    check_no_rank_is_left()


def test_settings_that_do_not_fit_are_a_value_error_of_launch(pair: Path) -> None:
    with pytest.raises(ValueError, match="max_context must be at most 256"):
        launch(settings_of(pair, PLAIN, max_context=1000), lambda updates: None)


def test_close_ends_open_requests_with_abort(pair: Path) -> None:
    collector = Collector()
    handle = launch(settings_of(pair, PLAIN), collector)
    handle.submit(request_of("r", [1], max_tokens=250))
    handle.close()
    assert collector.ends(["r"])["r"].finish_reason == "abort"
    with pytest.raises(ServerError, match="closing"):
        handle.submit(request_of("s", [1]))
    handle.close()


def test_aborted_requests_leave_a_running_server(pair: Path) -> None:
    collector = Collector()
    handle = launch(settings_of(pair, PLAIN), collector)
    for i in range(20):
        handle.submit(request_of(f"a{i}", [1, i], max_tokens=250))
        handle.abort(f"a{i}")
    ends = collector.ends([f"a{i}" for i in range(20)])
    assert {end.finish_reason for end in ends.values()} <= {"abort"}
    assert run(handle, collector, REQUESTS[:1])["r0"] == outputs(engine_of(pair), REQUESTS[:1])["r0"]
    assert handle.stats().num_free_pages == handle.stats().num_total_pages
    handle.close()
