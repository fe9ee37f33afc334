"""Compare arms that ran the same prompts in interleaved blocks: ratio of ms per token, its interval, and a verdict in words.

Pure folds over records; the rules stand in `docs/metrics.md`. Leaves running the arms to `ddtree_bench.compare`.
ms per token of a prompt is Σ (done − sent) / Σ output tokens: at a fixed concurrency it is concurrency / (output tok/s), so
both rank alike. The interval is a bootstrap over prompts (all blocks of a prompt stay together), widened by what arms moved
against each other from block to block (Student t).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_bench.config import SPACE_KEYS
from ddtree_bench.metrics.acceptance import Acceptance, acceptance
from ddtree_bench.metrics.certificate import Certificate
from ddtree_bench.metrics.latency import e2e_ms
from ddtree_bench.metrics.summary import prompt_of
from ddtree_bench.metrics.throughput import ms_per_token, totals
from ddtree_bench.records import GateResult, RequestRecord

FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference shown"
WITHHELD, CONFOUNDED = "withheld", "confounded"
TREE_KEYS = (*SPACE_KEYS, "mode")
MIN_CLASSES = 2
MIN_PROMPTS = 2  # a single prompt has no spread, and its interval would be a point


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one server did: its records block by block, its flat configuration, and the gates it passed or not.

    `counters` are differences of the server's counters over all blocks, for servers that tell no counts for each request.
    """

    name: str
    label: str
    blocks: Sequence[Sequence[RequestRecord]]
    config: Mapping[str, Any] = field(default_factory=dict)
    gates: Sequence[GateResult] = ()
    counters: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """Totals of one arm over all blocks; None where unknown. `acceptance_length` is pooled, the request mean only beside it."""

    name: str
    label: str
    ms_per_token: float | None
    output_tok_s: float | None
    acceptance_length: float | None
    acceptance_length_request_mean: float | None
    num_requests: int
    num_failed_requests: int
    output_tokens: int | None
    block_ms_per_token: Sequence[float | None]
    gates: Sequence[GateResult]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """ms per token of an arm over the baseline's, with its interval; under 1 the arm is faster."""

    value: float
    low: float
    high: float
    num_prompts: int
    num_blocks: int

    @property
    def verdict(self) -> str:
        """Return what the interval alone says."""
        if self.high < 1.0:
            return FASTER
        return SLOWER if self.low > 1.0 else NO_DIFFERENCE


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One arm against a baseline. `speedup` (baseline ms / arm ms) is None unless gates, drift and configuration allow it."""

    baseline: str
    arm: str
    ratio: Ratio | None
    class_ratios: Mapping[str, Ratio]
    speedup: float | None
    verdict: str
    reasons: Sequence[str]
    differences: Sequence[str]
    scope: str | None
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole result; `ranking` is by ms per token, never by acceptance."""

    arms: Sequence[ArmSummary]
    pairs: Sequence[Pair]
    certificates: Sequence[Certificate]
    drift: float | None
    drift_arm: str
    drift_limit: float | None
    ranking: Sequence[str]
    notes: Sequence[str]
    seed: int

    @property
    def main(self) -> Pair:
        """The pair that was asked for: A against B."""
        return self.pairs[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return dataclasses.asdict(self)


def compare_arms(
    baseline: Arm,
    arm: Arm,
    plain: Arm | None = None,
    *,
    certificates: Sequence[Certificate] = (),
    drift_limit: float | None = 0.05,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare `arm` with `baseline`, and both with plain decoding where that ran beside them.

    Args:
        certificates: output equality between arms; a real difference fails the gate of its arm.
        drift_limit: greatest allowed max / min − 1 of the plain arm's ms per token over blocks (share); None: not checked.
    Raises:
        ValueError: an arm without blocks, or arms with different numbers of blocks.
    """
    arms = [baseline, arm] if plain is None else [plain, baseline, arm]
    if not arms[0].blocks or len({len(one.blocks) for one in arms}) != 1:
        raise ValueError(f"arms must have the same number of blocks, at least 1; given {[len(one.blocks) for one in arms]}")
    arms = [_with_gates(one, certificates) for one in arms]
    by_name = {one.name: one for one in arms}
    reference = arms[0]
    drift = drift_of(reference)
    pairs = [(baseline.name, arm.name)]
    if plain is not None:
        pairs += [(plain.name, baseline.name), (plain.name, arm.name)]
    rules = _Rules(arms, drift, drift_limit, confidence, num_resamples, seed)
    summaries = [summarise(one) for one in arms]
    ranked = sorted((s for s in summaries if s.ms_per_token is not None), key=lambda s: (s.ms_per_token, s.name))
    return Comparison(
        arms=summaries,
        pairs=[_compare_pair(by_name[first], by_name[second], rules) for first, second in pairs],
        certificates=list(certificates),
        drift=drift,
        drift_arm=reference.name,
        drift_limit=drift_limit,
        ranking=[s.name for s in ranked],
        notes=_notes(summaries, baseline.name, arm.name),
        seed=seed,
    )


def summarise(arm: Arm) -> ArmSummary:
    """Fold an arm's records; tok/s is Σ output tokens / Σ block windows (first due to last byte of each block)."""
    records = [record for block in arm.blocks for record in block]
    blocks = [totals(block, None) for block in arm.blocks]
    tokens = [block["output_tokens"] for block in blocks]
    window_s = sum(block["window_s"] or 0.0 for block in blocks)
    is_known = None not in tokens and window_s > 0
    is_plain = arm.config.get("mode") == "plain"  # commits one token a step: no draft, so no acceptance
    pooled = Acceptance() if is_plain else acceptance(records, arm.counters)
    return ArmSummary(
        name=arm.name,
        label=arm.label,
        ms_per_token=ms_per_token(records),
        output_tok_s=sum(tokens) / window_s if is_known else None,
        acceptance_length=pooled.acceptance_length,
        acceptance_length_request_mean=pooled.request_mean,
        num_requests=len(records),
        num_failed_requests=sum(record.outcome != "ok" for record in records),
        output_tokens=sum(tokens) if None not in tokens else None,
        block_ms_per_token=[ms_per_token(block) for block in arm.blocks],
        gates=list(arm.gates),
    )


def drift_of(arm: Arm) -> float | None:
    """Return max / min − 1 of ms per token over blocks, on the prompts that every block completed; None below two blocks."""
    if len(arm.blocks) < 2:
        return None
    table = _cells([arm])
    if table is None:
        return None
    ms_B = table.ms_APB[0].sum(axis=0) / table.tokens_APB[0].sum(axis=0)
    return float(ms_B.max() / ms_B.min() - 1.0)


def bootstrap_ratio(
    baseline: Arm,
    arm: Arm,
    *,
    beside: Sequence[Arm] = (),
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
    class_: str | None = None,
) -> Ratio | None:
    """Return the pooled ratio of ms per token and its interval; None below two prompts that all arms completed.

    log ratio of every resample of the prompts, plus t(f) · s · √(2 / K) for K > 1 blocks, with s² the variance of an arm's log
    ms per token in a block once arm and block are taken out. It is pooled over all arms, f = (arms − 1)(K − 1), but never
    taken smaller than these two arms alone show.

    Args:
        beside: further arms of the same blocks (plain decoding), which only help to know s.
    """
    arms = [baseline, arm, *beside]
    table = _cells(arms, class_)
    if table is None or len(table.prompt_ids) < MIN_PROMPTS:
        return None
    num_prompts, num_blocks = table.ms_APB.shape[1:]
    ms_AP, tokens_AP = table.ms_APB.sum(axis=2)[:2], table.tokens_APB.sum(axis=2)[:2]

    def log_ratio(weights: np.ndarray) -> np.ndarray:
        logs = [np.log((weights @ ms_AP[a]) / (weights @ tokens_AP[a])) for a in (0, 1)]
        return logs[1] - logs[0]

    point = float(log_ratio(np.ones(num_prompts)))
    rng = np.random.default_rng(seed)
    chances_P = np.full(num_prompts, 1.0 / num_prompts)
    draws = log_ratio(rng.multinomial(num_prompts, chances_P, size=num_resamples).astype(float))
    if num_blocks > 1:
        log_AB = np.log(table.ms_APB.sum(axis=1) / table.tokens_APB.sum(axis=1))
        spread = max(_block_spread(log_AB), _block_spread(log_AB[:2])) * np.sqrt(2.0 / num_blocks)
        draws = draws + spread * rng.standard_t((len(arms) - 1) * (num_blocks - 1), size=num_resamples)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(draws, [tail, 1.0 - tail])
    value, low, high = (float(np.exp(x)) for x in (point, min(low, point), max(high, point)))
    return Ratio(value=value, low=low, high=high, num_prompts=num_prompts, num_blocks=num_blocks)


def _block_spread(log_AB: np.ndarray) -> float:
    """Return the standard deviation of what is left of [arm, block] once the means of arms and blocks are taken out."""
    left_AB = log_AB - log_AB.mean(axis=1, keepdims=True) - log_AB.mean(axis=0, keepdims=True) + log_AB.mean()
    return float(np.sqrt((left_AB**2).sum() / ((log_AB.shape[0] - 1) * (log_AB.shape[1] - 1))))


def config_differences(baseline: Arm, arm: Arm) -> list[str]:
    """Return `key: a / b` for every setting but the tree's own that differs; a drafter is no difference beside plain decoding."""
    is_plain = "plain" in (baseline.config.get("mode"), arm.config.get("mode"))
    ignored = {*TREE_KEYS, *(("drafter",) if is_plain else ())}
    keys = [key for key in sorted({*baseline.config, *arm.config}) if key not in ignored]
    pairs = [(key, baseline.config.get(key), arm.config.get(key)) for key in keys]
    return [f"{key}: {first!r} / {second!r}" for key, first, second in pairs if first != second]


@dataclass(frozen=True)
class _Rules:
    arms: Sequence[Arm]
    drift: float | None
    drift_limit: float | None
    confidence: float
    num_resamples: int
    seed: int


@dataclass(frozen=True)
class _Cells:
    """ms and output tokens of every cell [arm, prompt, block]; only prompts that every arm completed in every block."""

    ms_APB: np.ndarray
    tokens_APB: np.ndarray
    prompt_ids: list[str]


def _cells(arms: Sequence[Arm], class_: str | None = None) -> _Cells | None:
    """Return the table; repeats of a prompt inside a block are added up. None when no prompt is complete."""
    totals_of: dict[str, dict[tuple[int, int], tuple[float, int]]] = {}
    broken: set[str] = set()
    for a, arm in enumerate(arms):
        for k, block in enumerate(arm.blocks):
            for record in block:
                if class_ is not None and record.class_ != class_:
                    continue
                ms, prompt = e2e_ms(record), prompt_of(record)
                if record.outcome != "ok" or ms is None or not record.output_tokens:
                    broken.add(prompt)
                    continue
                cells = totals_of.setdefault(prompt, {})
                old_ms, old_tokens = cells.get((a, k), (0.0, 0))
                cells[(a, k)] = (old_ms + ms, old_tokens + record.output_tokens)
    num_blocks = len(arms[0].blocks)
    wanted = [(a, k) for a in range(len(arms)) for k in range(num_blocks)]
    ids = sorted(p for p, cells in totals_of.items() if p not in broken and all(key in cells for key in wanted))
    if not ids:
        return None
    table = np.array([[totals_of[p][key] for key in wanted] for p in ids], dtype=np.float64)
    table = table.reshape(len(ids), len(arms), num_blocks, 2).transpose(3, 1, 0, 2)
    return _Cells(table[0], table[1], ids)


def _compare_pair(baseline: Arm, arm: Arm, rules: _Rules) -> Pair:
    def ratio_of(class_: str | None = None) -> Ratio | None:
        return bootstrap_ratio(
            baseline,
            arm,
            beside=[one for one in rules.arms if one.name not in (baseline.name, arm.name)],
            confidence=rules.confidence,
            num_resamples=rules.num_resamples,
            seed=rules.seed,
            class_=class_,
        )

    ratio = ratio_of()
    classes = sorted({r.class_ for block in arm.blocks for r in block if r.class_ is not None})
    class_ratios = {name: found for name in classes if (found := ratio_of(name)) is not None}
    differences = config_differences(baseline, arm)
    withheld = _reasons_to_withhold(baseline, arm, ratio, rules)
    verdict = WITHHELD if withheld or ratio is None else CONFOUNDED if differences else ratio.verdict
    scope = None if len(classes) >= MIN_CLASSES else f"for this class only: {classes[0] if classes else 'unnamed'}"
    reasons = withheld + [f"configuration differs in {one}" for one in differences] + _class_conflicts(class_ratios)
    speedup = 1.0 / ratio.value if ratio is not None and verdict not in (WITHHELD, CONFOUNDED) else None
    return Pair(
        baseline=baseline.name,
        arm=arm.name,
        ratio=ratio,
        class_ratios=class_ratios,
        speedup=speedup,
        verdict=verdict,
        reasons=reasons,
        differences=differences,
        scope=scope,
        sentence=_sentence(baseline.name, arm.name, ratio, verdict, withheld, differences, scope),
    )


def _reasons_to_withhold(baseline: Arm, arm: Arm, ratio: Ratio | None, rules: _Rules) -> list[str]:
    reasons = [] if ratio is not None else [f"fewer than {MIN_PROMPTS} prompts were completed by all arms in every block"]
    for one in (baseline, arm):
        reasons += [f"{one.name} failed the gate {g.name!r}: {g.detail}" for g in one.gates if g.passed is False]
        reasons += [f"{one.name} could not show the gate {g.name!r}: {g.detail}" for g in one.gates if _is_untraced(g)]
    if rules.drift_limit is not None and len(baseline.blocks) == 1:
        reasons.append("one block shows no drift of the machine; run at least two, or set gates.drift to none")
    if rules.drift is not None and rules.drift_limit is not None and rules.drift > rules.drift_limit:
        reasons.append(
            f"{rules.arms[0].name} drifted {rules.drift:.1%} between blocks, over the limit of {rules.drift_limit:.1%}; "
            "let the machine settle and run it again"
        )
    return reasons


def _is_untraced(gate: GateResult) -> bool:
    """True where outputs differ and one of the differences or more could not be traced to a numeric tie."""
    return gate.passed is None and bool(gate.numbers.get("num_undecided"))


def _class_conflicts(ratios: Mapping[str, Ratio]) -> list[str]:
    faster = [name for name, ratio in ratios.items() if ratio.verdict == FASTER]
    slower = [name for name, ratio in ratios.items() if ratio.verdict == SLOWER]
    return [f"faster in {', '.join(faster)} but slower in {', '.join(slower)}"] if faster and slower else []


def _sentence(
    baseline: str,
    arm: str,
    ratio: Ratio | None,
    verdict: str,
    withheld: Sequence[str],
    differences: Sequence[str],
    scope: str | None,
) -> str:
    if verdict == WITHHELD or ratio is None:
        return f"verdict withheld for {arm} against {baseline}: {'; '.join(withheld)}"
    figures = f"{ratio.value:.3f} of its ms per token [{ratio.low:.3f}, {ratio.high:.3f}]"
    if verdict == CONFOUNDED:
        return f"confounded: {arm} against {baseline} differs in more than the tree ({'; '.join(differences)}); {figures}"
    words = {
        FASTER: f"{arm} is faster than {baseline}",
        SLOWER: f"{arm} is slower than {baseline}",
        NO_DIFFERENCE: f"no difference shown between {arm} and {baseline}",
    }[verdict]
    return f"{words}{', ' + scope if scope else ''}: {figures}"


def _with_gates(arm: Arm, certificates: Sequence[Certificate]) -> Arm:
    """Return the arm with the gates that its records decide: requests that failed, and its certificates."""
    records = [record for block in arm.blocks for record in block]
    failed = [record for record in records if record.outcome != "ok"]
    kinds = sorted({record.error_kind or "unknown" for record in failed})
    detail = f"{len(failed)} of {len(records)} requests failed" + (f" ({', '.join(kinds)})" if kinds else "")
    gates = [GateResult(name="no failed requests", passed=not failed and bool(records), detail=detail)]
    gates += [certificate.gate() for certificate in certificates if certificate.arm == arm.name]
    return dataclasses.replace(arm, gates=[*arm.gates, *gates])


def _notes(summaries: Sequence[ArmSummary], baseline: str, arm: str) -> list[str]:
    """Return what would mislead somebody who reads acceptance instead of time."""
    by_name = {summary.name: summary for summary in summaries}
    notes = _acceptance_notes(by_name[baseline], by_name[arm])
    for summary in summaries:
        if summary.acceptance_length is not None and summary.acceptance_length <= 1.0 + 1e-9:
            notes.append(f"{summary.name}: acceptance length 1.00, the draft contributes nothing")
    return notes


def _acceptance_notes(a: ArmSummary, b: ArmSummary) -> list[str]:
    if a.acceptance_length is None or b.acceptance_length is None or a.acceptance_length == b.acceptance_length:
        return []
    notes = []
    longer, shorter = (a, b) if a.acceptance_length > b.acceptance_length else (b, a)
    long_mean, short_mean = longer.acceptance_length_request_mean, shorter.acceptance_length_request_mean
    if long_mean is not None and short_mean is not None and long_mean < short_mean:
        notes.append(
            f"acceptance length flips: pooled {longer.name} {longer.acceptance_length:.2f}, {shorter.name} "
            f"{shorter.acceptance_length:.2f}, but as a mean over requests {long_mean:.2f} and {short_mean:.2f}; pooled counts"
        )
    if longer.ms_per_token is not None and shorter.ms_per_token is not None and longer.ms_per_token > shorter.ms_per_token:
        notes.append(f"{longer.name} accepts more than {shorter.name} and yet takes more ms per token: time ranks")
    return notes
