"""Comparison of arms: the verdict, what withholds it, and the A/A behaviour of its interval."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ddtree_bench.metrics import comparison
from ddtree_bench.metrics.certificate import output_certificate
from ddtree_bench.metrics.comparison import Arm, compare_arms
from ddtree_bench.records import GateResult, RequestRecord


def request(prompt_id: str, ms: float, tokens: int = 10, *, steps: int | None = None, class_: str = "code", **changes: object):
    values: dict = {
        "request_id": f"{prompt_id}-r",
        "prompt_id": prompt_id,
        "class_": class_,
        "sent_s": 1.0,
        "done_s": 1.0 + ms / 1000.0,
        "text": f"text of {prompt_id}",
        "output_tokens": tokens,
        "num_verify_steps": steps,
        "num_accepted": None if steps is None else tokens - steps,
    }
    return RequestRecord(**(values | changes))


def arm(name: str, block_ms: list[list[float]], **changes: object) -> Arm:
    """Return an arm whose prompt p takes block_ms[k][p] ms for 10 tokens in block k; classes alternate."""
    blocks = [[request(f"p{p}", ms, class_="code" if p % 2 else "prose") for p, ms in enumerate(block)] for block in block_ms]
    return Arm(**({"name": name, "label": name, "blocks": blocks} | changes))


STEADY = [[100.0, 110.0, 120.0, 130.0]] * 3


def scaled(factor: float) -> list[list[float]]:
    return [[ms * factor for ms in block] for block in STEADY]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.8, "faster"), (1.25, "slower"), (1.0, "no difference shown")], ids=["faster", "slower", "same"]
)
def test_verdict_follows_the_interval(factor: float, verdict: str) -> None:
    result = compare_arms(arm("linear", STEADY), arm("tree", scaled(factor)), arm("plain", scaled(2.0)))
    assert result.main.verdict == verdict
    assert result.main.ratio is not None
    assert result.main.ratio.value == pytest.approx(factor)
    assert result.main.speedup == pytest.approx(1 / factor)
    assert [(p.baseline, p.arm) for p in result.pairs] == [("linear", "tree"), ("plain", "linear"), ("plain", "tree")]


def test_pooled_ratio_is_sums_over_sums() -> None:
    a = Arm(name="a", label="a", blocks=[[request("x", 100.0, 10), request("y", 900.0, 30)]])
    assert comparison.summarise(a).ms_per_token == pytest.approx(25.0)


def test_pooled_and_request_mean_acceptance_flip_is_flagged() -> None:
    """Pitfall 04: request means 5.5 < 5.9 but pooled 7.00 > 6.93."""
    a = Arm(name="a", label="a", blocks=[[request("x", 10, 100, steps=10), request("y", 10, 5, steps=5)]])
    b = Arm(name="b", label="b", blocks=[[request("x", 10, 90, steps=10), request("y", 10, 14, steps=5)]])
    result = compare_arms(a, b)
    assert [s.acceptance_length for s in result.arms] == pytest.approx([7.0, 104 / 15])
    assert [s.acceptance_length_request_mean for s in result.arms] == pytest.approx([5.5, 5.9])
    assert any("flips" in note for note in result.notes)


def test_ranked_by_time_and_never_by_acceptance() -> None:
    """Pitfall 12: the arm that accepts more is slower and ranks behind."""
    a = Arm(name="small", label="", blocks=[[request("x", 100, 100, steps=25), request("y", 100, 100, steps=25)]])
    b = Arm(name="large", label="", blocks=[[request("x", 150, 100, steps=14), request("y", 150, 100, steps=14)]])
    result = compare_arms(a, b)
    assert result.ranking == ["small", "large"]
    assert any("large accepts more" in note for note in result.notes)


def test_drift_of_plain_withholds_every_speedup() -> None:
    """Pitfall 17: plain at 21.35 and 17.77 ms per token between blocks is a drift of 20 %."""
    plain = arm("plain", [[213.5] * 4, [177.7] * 4] * 2)
    fast, slow = arm("tree", [[50.0] * 4] * 4), arm("linear", [[60.0] * 4] * 4)
    result = compare_arms(slow, fast, plain, drift_limit=0.05)
    assert result.drift == pytest.approx(21.35 / 17.77 - 1)
    assert {p.verdict for p in result.pairs} == {"withheld"}
    assert {p.speedup for p in result.pairs} == {None}
    assert "drifted 20.1%" in result.main.sentence
    assert compare_arms(slow, fast, plain, drift_limit=None).main.verdict == "faster"


def test_ranked_by_ms_per_token_when_baselines_drift() -> None:
    """Pitfall 17: (21.35, speedup 5.85) against (17.77, speedup 5.76): 3.649 against 3.085 ms per token, the second wins."""
    first, second = arm("first", [[21.35 / 5.85 * 10] * 4]), arm("second", [[17.77 / 5.76 * 10] * 4])
    assert compare_arms(first, second).ranking == ["second", "first"]


def test_baseline_is_measured_beside_the_arms() -> None:
    """Pitfall 19: plain decoding of the same machine and session is in every result that has it."""
    result = compare_arms(arm("linear", STEADY), arm("tree", STEADY), arm("plain", scaled(2.0)))
    assert result.arms[0].name == "plain"
    assert result.arms[0].ms_per_token == pytest.approx(23.0)


@pytest.mark.parametrize(
    ("classes", "scope"), [(["code"], "for this class only: code"), (["code", "prose"], None)], ids=["one", "two"]
)
def test_verdict_of_one_workload_class_says_so(classes: list[str], scope: str | None) -> None:
    """Pitfall 21: a canary of one class is no verdict about others."""
    names = [classes[i % len(classes)] for i in range(6)]
    a = Arm(name="a", label="a", blocks=[[request(f"p{i}", 100 + i, class_=c) for i, c in enumerate(names)]])
    b = Arm(name="b", label="b", blocks=[[request(f"p{i}", 50 + i, class_=c) for i, c in enumerate(names)]])
    result = compare_arms(a, b, drift_limit=None)
    assert result.main.scope == scope
    assert ("for this class only" in result.main.sentence) == (scope is not None)
    assert sorted(result.main.class_ratios) == sorted(classes)


def test_classes_that_disagree_are_named() -> None:
    """Pitfall 21: +21.9 % on one class and -49 % on another."""
    names = ["canary"] * 6 + ["real"] * 6
    a = [[request(f"p{i}", 100 + i % 3, class_=name) for i, name in enumerate(names)]]
    b = [[request(f"p{i}", (78 if i < 6 else 149) + i % 3, class_=name) for i, name in enumerate(names)]]
    reasons = compare_arms(Arm(name="a", label="a", blocks=a), Arm(name="b", label="b", blocks=b)).main.reasons
    assert "faster in canary but slower in real" in reasons


@pytest.mark.parametrize("key", ["cuda_graph", "overlap", "attention_backend"])
def test_difference_other_than_the_tree_is_confounded(key: str) -> None:
    """Pitfalls 22 and 23: graphs, overlap or kernels that differ between arms are listed."""
    a = arm("linear", STEADY, config={"mode": "linear", "node_budget": 15, key: True})
    b = arm("tree", scaled(0.5), config={"mode": "tree", "node_budget": 31, key: False})
    result = compare_arms(a, b)
    assert (result.main.verdict, result.main.speedup) == ("confounded", None)
    assert result.main.differences == [f"{key}: True / False"]


def test_tree_settings_are_no_difference() -> None:
    a = arm("linear", STEADY, config={"mode": "linear", "block_size": 8, "drafter": "d"})
    b = arm("tree", scaled(0.5), config={"mode": "tree", "block_size": 16, "top_k": 4, "drafter": "d"})
    assert compare_arms(a, b, arm("plain", STEADY, config={"mode": "plain"})).main.verdict == "faster"


def test_failed_gate_leaves_the_speedup_empty() -> None:
    b = arm("tree", scaled(0.5), gates=[GateResult(name="losslessness", passed=False, detail="3 of 3 differ")])
    result = compare_arms(arm("linear", STEADY), b)
    assert (result.main.verdict, result.main.speedup) == ("withheld", None)
    assert "losslessness" in result.main.sentence


def test_failed_request_is_never_a_success() -> None:
    blocks = [[request("p0", 50), request("p1", 50, outcome="error", error_kind="server")]]
    result = compare_arms(arm("a", [[100.0, 100.0]]), Arm(name="b", label="b", blocks=blocks))
    assert result.main.speedup is None
    assert "1 of 2 requests failed (server)" in result.main.sentence


def test_draft_that_contributes_nothing_is_said() -> None:
    """Pitfall 08: an acceptance length of 1.0 is invisible in the output."""
    b = Arm(name="tree", label="", blocks=[[request("p0", 10, 10, steps=10)]])
    assert any("contributes nothing" in note for note in compare_arms(arm("plain", [[10.0]]), b).notes)


def test_plain_arm_has_no_acceptance_and_no_note_of_it() -> None:
    blocks = [[request("p0", 10, 10, steps=9, num_accepted=0)]]
    result = compare_arms(Arm(name="plain", label="", blocks=blocks, config={"mode": "plain"}), arm("tree", [[10.0]]))
    assert result.arms[0].acceptance_length is None
    assert result.notes == []


def test_no_common_prompt_is_withheld() -> None:
    b = Arm(name="b", label="", blocks=[[request("other", 10.0)]])
    assert compare_arms(arm("a", [[10.0]]), b).main.verdict == "withheld"


def test_one_block_shows_no_drift_and_so_no_speedup() -> None:
    a, b = arm("a", STEADY[:1]), arm("b", [[ms / 2 for ms in STEADY[0]]])
    assert compare_arms(a, b).main.speedup is None
    assert "one block shows no drift" in compare_arms(a, b).main.sentence
    assert compare_arms(a, b, drift_limit=None).main.verdict == "faster"


def test_single_prompt_gives_no_interval_and_so_no_verdict() -> None:
    pair = compare_arms(arm("a", [[10.0]]), arm("b", [[5.0]])).main
    assert (pair.verdict, pair.ratio, pair.speedup) == ("withheld", None, None)
    assert "fewer than 2 prompts" in pair.sentence


def test_arms_need_the_same_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="same number of blocks"):
        compare_arms(arm("a", STEADY), arm("b", STEADY[:1]))


def test_same_seed_gives_the_same_interval() -> None:
    rng = np.random.default_rng(3)
    a, b = (arm(n, rng.uniform(90, 110, size=(3, 9)).tolist()) for n in ("a", "b"))
    assert compare_arms(a, b, seed=5).to_dict() == compare_arms(a, b, seed=5).to_dict()


def test_certificate_counts_ties_and_real_differences() -> None:
    a = arm("plain", [[10.0] * 4])
    texts = ["text of p0", "text of pX", "text of p2", "other"]
    b = Arm(name="tree", label="", blocks=[[request(f"p{i}", 10.0, 7, text=text) for i, text in enumerate(texts)]])
    kinds = {"text of pX": "tie", "other": "real"}
    certificate = output_certificate(a, b, lambda _, second: kinds[second.text])
    assert (certificate.num_prompts, certificate.tokens_compared) == (4, 28)
    assert (certificate.num_exact, certificate.num_numeric_ties, certificate.num_real_differences) == (2, 1, 1)
    assert certificate.gate().passed is False
    assert compare_arms(a, b, certificates=[certificate]).main.speedup is None
    tie_only = output_certificate(a, b, lambda *_: "tie")
    assert tie_only.gate().passed is True
    assert output_certificate(a, b, lambda *_: "undecided").gate().passed is None
    assert output_certificate(a, b).num_real_differences == 2


def test_differences_that_nobody_traced_withhold_the_speedup() -> None:
    """A tie must be shown: where the target cannot be asked, other text is no proof of a numeric tie."""
    b = arm("tree", scaled(0.5))
    b = Arm(name="tree", label="", blocks=[[dataclasses.replace(r, text="other") for r in block] for block in b.blocks])
    a = arm("linear", STEADY)
    blind = compare_arms(a, b, certificates=[output_certificate(a, b, lambda *_: "undecided")])
    assert (blind.main.verdict, blind.main.speedup) == ("withheld", None)
    assert "not traced to a tie or a fault" in blind.main.sentence
    traced = compare_arms(a, b, certificates=[output_certificate(a, b, lambda *_: "tie")])
    assert traced.main.verdict == "faster"


def test_one_traced_tie_does_not_speak_for_differences_that_stay_undecided() -> None:
    a, b = arm("linear", STEADY), arm("tree", scaled(0.5))
    b = Arm(name="tree", label="", blocks=[[dataclasses.replace(r, text="other") for r in block] for block in b.blocks])
    certificate = output_certificate(a, b, lambda first, _: "tie" if first.prompt_id == "p0" else "undecided")
    assert (certificate.num_numeric_ties, certificate.num_undecided) == (1, 3)
    partly = compare_arms(a, b, certificates=[certificate])
    assert (partly.main.verdict, partly.main.speedup) == ("withheld", None)
    assert "3 differences not traced to a tie or a fault" in partly.main.sentence


def test_a_certificate_says_what_a_tie_was_taken_to_be() -> None:
    certificate = output_certificate(arm("a", [[10.0]]), arm("b", [[10.0]]), lambda *_: "tie")
    noted = dataclasses.replace(certificate, note="tie limit assumes logits of at most 16")
    assert "16" not in noted.gate().detail, "no tie, no note"
    ties = dataclasses.replace(noted, num_numeric_ties=1, num_exact=0)
    assert ties.gate().detail.endswith("; tie limit assumes logits of at most 16")


def test_large_effect_shows_with_two_noisy_blocks() -> None:
    """Plain beside the arms helps to know the noise of a block: 2.5 times as fast is shown although a block was off by 15 %."""
    plain, linear = arm("plain", [[200.0] * 6, [202.0] * 6]), arm("linear", [[100.0] * 6, [99.0] * 6])
    tree = arm("tree", [[40.0] * 6, [46.0] * 6])
    assert compare_arms(linear, tree, plain).main.verdict == "faster"


def simulated(rng: np.random.Generator, effect: float, *, num_prompts: int, num_blocks: int) -> list[Arm]:
    spread, drift = 0.10, 0.01
    base = 1000.0 * np.exp(rng.normal(0, 0.3, num_prompts))
    arms = []
    for name, gain in (("a", 0.0), ("b", effect)):
        noise = rng.normal(0, spread / np.sqrt(2), num_prompts)[None, :] + rng.normal(0, drift, num_blocks)[:, None]
        arms.append(arm(name, (base * np.exp(noise + gain)).tolist()))
    return arms


@pytest.mark.parametrize(
    ("effect", "least", "most"), [(0.0, 0, 9), (-0.03, 80, 100)], ids=["a server with itself", "a true 3 % difference"]
)
def test_verdicts_of_simulated_comparisons(effect: float, least: int, most: int) -> None:
    """200 prompts, 8 blocks, spread of the per-prompt ratio 10 %, every block of every arm off by 1 %; of 100 comparisons."""
    rng = np.random.default_rng(11)
    shown = 0
    for _ in range(100):
        a, b = simulated(rng, effect, num_prompts=200, num_blocks=8)
        ratio = comparison.bootstrap_ratio(a, b, confidence=0.95, num_resamples=400, seed=0)
        assert ratio is not None
        shown += ratio.verdict != comparison.NO_DIFFERENCE
    assert least <= shown <= most
