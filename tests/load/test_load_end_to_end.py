"""The runner against the mock over real HTTP."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mock_server import running_mock

from ddtree_bench.config import LoadSpec
from ddtree_bench.load.client import server_root
from ddtree_bench.load.runner import LoadResult, run_load
from ddtree_bench.load.workloads import prompts_of_texts
from ddtree_bench.metrics.summary import summarise_load, trial_metrics
from ddtree_bench.records import read_requests

ENDPOINTS = ("chat", "completions", "generate")


def spec_of(path: Path, **more: Any) -> LoadSpec:
    given: dict[str, Any] = {"num_prompts": 6, "num_warmups": 0, "max_concurrency": 3, "max_tokens": 20, "timeout_s": 20.0}
    return LoadSpec(dataset_path=str(path), **given | more)


def identity_holds(result: LoadResult) -> bool:
    return all(
        r.output_tokens == 1 + (r.num_accepted or 0) + (r.num_verify_steps or 0) - (r.num_cut or 0) for r in result.records
    )


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_endpoint_gives_tokens_text_and_acceptance(prompts_file: Path, endpoint: str) -> None:
    with running_mock(acceptance_length=4.0) as mock:
        result = run_load(mock.url, spec_of(prompts_file, endpoint=endpoint))
    assert [record.outcome for record in result.records] == ["ok"] * 6
    assert {record.output_tokens for record in result.records} == {20}
    assert {record.token_source for record in result.records} == {"usage"}
    assert {record.finish_reason for record in result.records} == {"length"}
    assert [tokens for _, tokens in result.records[0].chunks] == [1, 4, 4, 4, 4, 3]
    assert identity_holds(result)
    assert mock.server.num_generations == 6
    assert mock.server.peak_in_flight <= 3
    summary = summarise_load(result)
    assert summary["acceptance_length"] == 4.0
    assert summary["output_tokens"] == 120
    assert set(summary["classes"]) == {"code", "prose", "test"}
    window = result.counters.values
    assert (window["output_tokens"], window["num_requests"], window["num_accepted"]) == (120, 6, 90)


def test_endpoints_agree_on_the_text(prompts_file: Path) -> None:
    texts = []
    with running_mock() as mock:
        for endpoint in ENDPOINTS:
            result = run_load(mock.url, spec_of(prompts_file, endpoint=endpoint))
            texts.append({record.prompt_id: record.text for record in result.records})
    assert texts[0] == texts[1] == texts[2]
    assert all(texts[0].values())


def test_zero_warm_ups_send_exactly_n_and_warm_ups_are_neither_recorded_nor_measured(prompts_file: Path) -> None:
    with running_mock() as mock:
        run_load(mock.url, spec_of(prompts_file, num_prompts=5))
        assert mock.server.num_generations == 5
        result = run_load(mock.url, spec_of(prompts_file, num_prompts=5, num_warmups=2))
        assert mock.server.num_generations == 5 + 7
    assert len(result.records) == 5
    assert result.counters.values["num_requests"] == 5


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_base_url_with_or_without_v1(suffix: str) -> None:
    assert server_root("http://host:1" + suffix) == "http://host:1"


@pytest.mark.parametrize("url", ["host:1", "ftp://host", "", "http://", "http://host:x", "http://host:99999", "http://[::1"])
def test_bad_base_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url must begin with http"):
        server_root(url)


FAULT_KINDS = {
    "http_503": "http_503",
    "in_band_error": "server",
    "truncated": "truncated",
    "empty": "empty",
    "html": "protocol",
    "broken_json": "protocol",
    "hang": "timeout",
}


@pytest.mark.parametrize(("fault", "kind"), FAULT_KINDS.items())
def test_fault_fails_the_request_and_no_other(prompts_file: Path, fault: str, kind: str) -> None:
    timeout_s = 0.5 if fault == "hang" else 20.0
    with running_mock(fault=fault, fault_every=3) as mock:
        result = run_load(mock.url, spec_of(prompts_file, num_prompts=6, max_concurrency=1, timeout_s=timeout_s))
        assert mock.server.num_generations == 6  # nothing is retried
    assert [record.error_kind for record in result.records] == [None, None, kind, None, None, kind]
    summary = summarise_load(result)
    assert summary["num_failed_requests"] == 2
    assert summary["failures"][kind]["count"] == 2
    assert summary["failures"][kind]["example"]
    assert summary["output_tokens"] == 4 * 20


def test_server_that_is_not_there_is_a_record_of_kind_connect(prompts_file: Path) -> None:
    result = run_load("http://127.0.0.1:9", spec_of(prompts_file, num_prompts=2, endpoint="generate"))
    assert [record.error_kind for record in result.records] == ["connect", "connect"]
    assert result.counters.reason


def test_no_models_metrics_or_server_info_is_no_error(prompts_file: Path) -> None:
    knobs = {"has_models": False, "metrics": "none", "has_server_info": False, "has_meta_info": False}
    with running_mock(**knobs) as mock:
        for options in ({"endpoint": "generate"}, {"endpoint": "chat"}):
            result = run_load(mock.url, spec_of(prompts_file, **options), model="any")
            summary = summarise_load(result)
            assert summary["num_failed_requests"] == 0
            assert summary["output_tok_s"] > 0
            assert summary["acceptance_length"] is None
            assert any("acceptance_length is unknown" in text and "404" in text for text in summary["warnings"])
        result = run_load(mock.url, spec_of(prompts_file, endpoint="chat"))
    assert (result.model, [record.outcome for record in result.records]) == (None, ["ok"] * 6)
    assert "--model" in result.notes[-1]


def test_acceptance_from_counters_where_requests_tell_none(prompts_file: Path) -> None:
    with running_mock(acceptance_length=4.0, has_meta_info=False) as mock:
        run_load(mock.url, spec_of(prompts_file))
        summary = summarise_load(run_load(mock.url, spec_of(prompts_file)))
    assert summary["acceptance"]["source"] == "server_counters"
    assert summary["acceptance_length"] == 4.0


def test_no_usage_leaves_tokens_unknown_and_never_counts_chunks(prompts_file: Path) -> None:
    with running_mock(usage="none") as mock:
        result = run_load(mock.url, spec_of(prompts_file))
    assert {record.output_tokens for record in result.records} == {None}
    summary = summarise_load(result)
    assert (summary["output_tok_s"], summary["output_tokens"], summary["tpot_ms"]["mean"]) == (None, None, None)
    assert summary["ttft_ms"]["n"] == 6
    assert trial_metrics(summary)["ms_per_token"] is None


def test_final_usage_alone_gives_tokens_and_no_tokens_per_chunk(prompts_file: Path) -> None:
    with running_mock(usage="final") as mock:
        result = run_load(mock.url, spec_of(prompts_file))
    assert {record.output_tokens for record in result.records} == {20}
    assert {tokens for record in result.records for _, tokens in record.chunks} == {None}


def test_plain_decoding_has_one_token_a_chunk_and_a_tpot(prompts_file: Path) -> None:
    with running_mock(acceptance_length=None, usage="final", ms_per_round=4.0) as mock:
        result = run_load(mock.url, spec_of(prompts_file, max_tokens=8, num_prompts=2))
    summary = summarise_load(result)
    assert summary["tpot_ms"]["n"] == 2
    assert summary["tokens_per_chunk"] == 1.0
    assert summary["acceptance_length"] is None


def test_open_loop_keeps_planned_times_when_the_cap_holds_requests_back(prompts_file: Path) -> None:
    with running_mock(first_token_ms=30.0) as mock:
        spec = spec_of(prompts_file, request_rate=1000.0, burstiness=math.inf, max_concurrency=1, max_tokens=1)
        result = run_load(mock.url, spec)
    planned = [record.planned_s - result.window_start_s for record in result.records]  # type: ignore[operator]
    assert planned == pytest.approx([i / 1000 for i in range(6)], abs=1e-9)
    summary = summarise_load(result)
    assert summary["client"]["send_delay"]["max_ms"] > 100  # five requests of 30 ms came before the last
    assert summary["e2e_from_planned_ms"]["mean"] > summary["e2e_ms"]["mean"] + 50
    assert any("send delay" in text for text in summary["warnings"])


def test_more_connections_than_a_default_pool_allows(prompts_file: Path) -> None:
    with running_mock(first_token_ms=400.0) as mock:
        run_load(mock.url, spec_of(prompts_file, num_prompts=130, max_concurrency=130, max_tokens=1))
        assert mock.server.peak_in_flight == 130


def test_both_arms_of_a_comparison_get_the_same_prompts_and_seeds(prompts_file: Path) -> None:
    with running_mock() as mock:
        for _ in range(2):
            run_load(mock.url, spec_of(prompts_file, seed=4, max_concurrency=1, temperature=0.7, endpoint="completions"))
        bodies = [(body["prompt"], body["seed"], body["temperature"]) for body in mock.server.bodies]
    assert bodies[:6] == bodies[6:]
    assert len({seed for _, seed, _ in bodies}) == 6


def test_given_prompts_are_sent_in_order(prompts_file: Path) -> None:
    with running_mock() as mock:
        result = run_load(mock.url, spec_of(prompts_file, max_concurrency=1), prompts=prompts_of_texts(["one", "two"]))
        assert [body["prompt"] for body in mock.server.bodies] == ["one", "two"]
    assert [record.prompt_id for record in result.records] == ["text-0", "text-1"]


def test_key_headers_and_extra_body_are_sent(prompts_file: Path) -> None:
    with running_mock(api_key="secret") as mock:
        result = run_load(mock.url, spec_of(prompts_file, num_prompts=1), model="mock")
        assert result.records[0].error_kind == "http_401"
        options = {"api_key": "secret", "extra_body": {"top_k": 5, "max_tokens": 3}}
        result = run_load(mock.url, spec_of(prompts_file, num_prompts=1, ignore_eos=True), **options)
        body = mock.server.bodies[-1]
    assert (result.records[0].output_tokens, body["top_k"], body["ignore_eos"], body["model"]) == (3, 5, True, "mock")


def test_records_reach_the_disk_as_they_end(prompts_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "requests.jsonl"
    lines_seen = []

    def look(_: object) -> None:
        lines_seen.append(len(path.read_text(encoding="utf-8").splitlines()))

    with running_mock() as mock:
        result = run_load(mock.url, spec_of(prompts_file), log_path=path, on_record=look)
    assert lines_seen == [1, 2, 3, 4, 5, 6]
    assert Counter(r.prompt_id for r in read_requests(path)) == Counter(r.prompt_id for r in result.records)


def test_client_reports_its_own_health(prompts_file: Path) -> None:
    with running_mock(ms_per_round=10.0) as mock:
        client = summarise_load(run_load(mock.url, spec_of(prompts_file)))["client"]
    assert set(client) == {"send_delay", "loop_lag", "cpu_share"}
    assert client["cpu_share"] > 0
    assert client["send_delay"]["p50_ms"] is not None


@pytest.mark.parametrize(
    ("reply_tokens", "max_tokens", "expected"),
    [(3, 5, (3, "stop")), (6, 5, (5, "length")), (40, 7, (7, "length"))],
    ids=["stop inside the span", "stop beyond the cap", "cap inside the first span"],
)
def test_what_is_cut_is_counted_as_cut_and_not_as_output(
    prompts_file: Path, reply_tokens: int, max_tokens: int, expected: tuple[int, str]
) -> None:
    with running_mock(acceptance_length=16.0, reply_tokens=reply_tokens) as mock:
        result = run_load(mock.url, spec_of(prompts_file, num_prompts=1, max_tokens=max_tokens))
    record = result.records[0]
    assert (record.output_tokens, record.finish_reason) == expected
    assert record.num_cut == 17 - expected[0]
    assert identity_holds(result)
