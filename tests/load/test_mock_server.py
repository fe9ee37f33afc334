"""The mock's scripts obey the identities of a real engine, and as a process it looks like a server's."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from mock_server import mock_process, running_mock

from ddtree_bench.config import TreeSetting
from ddtree_bench.load.mock import MockSpec, acceptance_of_setting, ms_per_round_of_setting, write_script


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 128])
@pytest.mark.parametrize("length", [1.0, 2.5, 16.0])
def test_script_identities(max_tokens: int, length: float) -> None:
    """Pitfall 46: a cap of 7 and a round of 16 give 7 tokens; what was walked beyond them is counted as cut."""
    script = write_script(MockSpec(acceptance_length=length), "prompt", max_tokens=max_tokens)
    assert script.num_tokens == max_tokens
    assert script.num_tokens == 1 + sum(script.accepted) + len(script.accepted) - script.num_cut
    assert sum(script.histogram) == len(script.accepted)
    assert sum(i * n for i, n in enumerate(script.histogram)) == sum(script.accepted)


def test_text_depends_on_the_prompt_and_not_on_the_speculation() -> None:
    def text(prompt: str, length: float | None, **sampling: float) -> str:
        script = write_script(MockSpec(acceptance_length=length), prompt, max_tokens=50, **sampling)  # type: ignore[arg-type]
        return "".join("".join(chunk) for chunk in script.chunks)

    assert text("a", None) == text("a", 3.2) == text("a", 7.0, seed=9) != text("b", 3.2)
    assert text("a", 3.2, temperature=1.0, seed=1) != text("a", 3.2, temperature=1.0, seed=2)


def test_pooled_acceptance_comes_close_to_the_asked_length() -> None:
    script = write_script(MockSpec(acceptance_length=3.2), "a", max_tokens=2000)
    assert 1 + sum(script.accepted) / len(script.accepted) == pytest.approx(3.2, abs=0.01)


def test_setting_has_a_best_budget_inside() -> None:
    budgets = [1, 3, 7, 15, 31, 63]

    def ms_per_token(budget: int) -> float:
        setting = TreeSetting(node_budget=budget, top_k=8)
        return ms_per_round_of_setting(setting, 10.0) / (acceptance_of_setting(setting) or 1.0)

    costs = [ms_per_token(budget) for budget in budgets]
    lengths = [acceptance_of_setting(TreeSetting(node_budget=budget)) or 0.0 for budget in budgets]
    assert lengths == sorted(lengths)
    assert 0 < costs.index(min(costs)) < len(budgets) - 1
    assert acceptance_of_setting(TreeSetting(mode="plain")) is None


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_process_prints_its_url_and_stops_on_sigterm() -> None:
    with mock_process("--node-budget", "7") as (url, process):
        assert status(url + "/health") == 200
        assert b'"node_budget": 7' in urllib.request.urlopen(url + "/server_info", timeout=20).read()
        process.terminate()
        assert process.wait(20) == 0


def test_process_that_dies_at_the_start_leaves_its_last_words() -> None:
    with mock_process("--exit-after", "0", "--exit-code", "3", "--log-text", "CUDA out of memory") as (url, process):
        assert (url, process.wait(20)) == ("", 3)
        assert process.stderr is not None
        assert "CUDA out of memory" in process.stderr.read()


def test_never_ready() -> None:
    with running_mock(start_delay_s=float("inf")) as mock:
        assert status(mock.url + "/health") == 503


BAD_KNOBS: list[dict] = [
    *({"fault": "nope"}, {"usage": "nope"}, {"metrics": "nope"}, {"acceptance_length": 0.5}, {"fault_every": 0}),
    *({"ms_per_round": float("nan")}, {"first_token_ms": -1.0}, {"reply_tokens": -1}, {"start_delay_s": float("nan")}),
]


@pytest.mark.parametrize("options", BAD_KNOBS, ids=[next(iter(knob)) for knob in BAD_KNOBS])
def test_bad_knobs_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="given"):
        MockSpec(**options)
