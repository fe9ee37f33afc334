"""The gates of a trial: pure functions from what was observed to passed, failed, or could not be checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_bench.config import MODES, TreeSetting
from ddtree_bench.records import GateResult
from ddtree_bench.trial.plain import PlainOutput

# Our server tells the target's top logit beside the log-probabilities; others do not, and then its size is assumed.
ASSUMED_TOP_LOGIT = 16.0
ASSUMPTION = f"tie limit assumes logits of at most {ASSUMED_TOP_LOGIT:g}"
MAX_TIE_ULP = 2
AT_TEMPERATURE = "losslessness at temperature"


def bf16_ulp(value: float) -> float:
    """Return the distance between neighbouring bfloat16 numbers at a value (8 significant bits)."""
    return math.ldexp(1.0, math.frexp(abs(value))[1] - 8)


def losslessness(
    plain: Sequence[PlainOutput], texts: Sequence[str], *, dtype: str, concurrency: int = 1, name: str = "losslessness"
) -> GateResult:
    """Compare texts with plain decoding's: equal in float32; in bfloat16 they may part only where the top two logits tie."""
    verdicts = [divergence(output, text) for output, text in zip(plain, texts, strict=True)]
    is_allowed = [v is None or (dtype == "bfloat16" and v["is_tie"]) for v in verdicts]
    bad = [(o.prompt_id, v) for o, v, ok in zip(plain, verdicts, is_allowed, strict=True) if not ok and v is not None]
    num_ties = sum(v is not None for v in verdicts) - len(bad)
    detail = ""
    told = [v for v in verdicts if v is not None]
    if bad:
        prompt_id, verdict = bad[0]
        detail = f"{len(bad)} of {len(texts)} outputs differ from plain decoding; first {prompt_id!r}: {verdict['why']}"
    elif num_ties:
        detail = f"{num_ties} of {len(texts)} outputs part from plain decoding at numeric ties"
        detail += f"; {ASSUMPTION}" if any(v["is_assumed"] for v in told) else ""
    numbers: dict[str, float] = {"num_prompts": len(texts), "num_equal": len(texts) - num_ties - len(bad), "num_ties": num_ties}
    numbers |= {"tie_share": num_ties / max(len(texts), 1), "concurrency": concurrency}
    return GateResult(name=name, passed=not bad, detail=detail, numbers=numbers)


def why_not_at_temperature(*, is_keyed: bool, has_plain: bool, dtype: str) -> str | None:
    """Return why sampled texts cannot be compared with plain decoding's; None where they can."""
    if not (is_keyed and has_plain):
        return (
            "not checked: the server does not tell that its noise is keyed by seed and position, so sampled texts differ "
            "without fault; a distribution test is needed"
        )
    if dtype != "float32":
        return f"not checked: in {dtype} sampled texts may part by rounding, and a tie under noise cannot be shown"
    return None


def divergence(plain: PlainOutput, text: str) -> dict[str, Any] | None:
    """Return where a text parts from the plain output, the gap of plain decoding's top two there, and whether it is a tie.

    A tie is a gap of at most 2 ULP of bfloat16 at the target's top logit there; `is_assumed` tells that the logit is unknown.
    """
    if text == plain.text:
        return None
    common = next((i for i, (a, b) in enumerate(zip(plain.text, text, strict=False)) if a != b), min(len(text), len(plain.text)))
    where = f"at character {common}, plain {plain.text[common : common + 20]!r}, here {text[common : common + 20]!r}"
    unproven = {"character": common, "gap": None, "is_tie": False, "is_assumed": False}
    if plain.tokens is None or plain.top is None:
        return {**unproven, "why": f"{where}; the server tells no log-probabilities, so a tie cannot be shown"}
    index, start = token_at(plain.tokens, common)
    best = sorted(plain.top[index].items(), key=lambda item: -item[1])[:2] if index < len(plain.top) else []
    if len(best) < 2:
        return {**unproven, "why": f"{where}; the second-best token there is unknown"}
    (_, first), (runner_up, second) = best
    logits = plain.top_logits or ()
    is_assumed = index >= len(logits) or logits[index] is None
    gap, limit = first - second, MAX_TIE_ULP * bf16_ulp(ASSUMED_TOP_LOGIT if is_assumed else logits[index])
    is_runner_up = text.startswith(runner_up, start) or not text[start:]  # an end of text shows no string
    is_tie = gap <= limit and is_runner_up
    kind = "numeric tie" if is_tie else "BUG" if is_runner_up else "BUG: not even the second-best token"
    why = f"{where}; gap of the top two {gap:.3g}, a tie up to {limit:g}{f' ({ASSUMPTION})' if is_assumed else ''}: {kind}"
    return {"character": common, "gap": gap, "is_tie": is_tie, "is_assumed": is_assumed, "why": why}


def token_at(tokens: Sequence[str], character: int) -> tuple[int, int]:
    """Return the index and first character of the token that covers a character."""
    start = 0
    for index, token in enumerate(tokens):
        if character < start + len(token):
            return index, start
        start += len(token)
    return len(tokens), start


def min_acceptance(metrics: Mapping[str, Any], limit: float | None, mode: str) -> GateResult | None:
    """Check the pooled acceptance length; plain decoding has none."""
    if limit is None or mode == "plain":
        return None
    value = metrics.get("acceptance_length")
    if value is None:
        return GateResult(name="min_acceptance", passed=False, detail=f"must be at least {limit:g}; the server does not tell it")
    detail = f"must be at least {limit:g}; measured {value:.3f}"
    return GateResult(name="min_acceptance", passed=value >= limit, detail=detail)


def effective_setting(info: Mapping[str, Any] | None) -> TreeSetting | None:
    """Return the canonical setting that /server_info tells, in its `ddtree` block or flat; None where it tells none."""
    info = info or {}
    block = info.get("ddtree", info)
    if not isinstance(block, Mapping) or block.get("mode") not in MODES:
        return None
    names = ("mode", "block_size", "depth", "top_k", "branching", "node_budget", "draft_temperature")
    return TreeSetting(**{name: block[name] for name in names if block.get(name) is not None}).canonical()


def setting_gate(asked: TreeSetting, effective: TreeSetting | None) -> GateResult:
    """Check that the server runs the setting that was asked."""
    if effective is None:
        return GateResult(name="setting", passed=None, detail="the server does not tell its setting")
    want = asked.canonical()
    return GateResult(
        name="setting", passed=effective == want, detail=f"asked {want.label()}; the server runs {effective.label()}"
    )


def capacity_warning(info: Mapping[str, Any] | None, wanted: int | None) -> str | None:
    """Return what to say where memory lets fewer requests run together than are wanted; None where it does not or nobody tells.

    Our server tells how many requests of full context its cache holds, SGLang its effective cap.
    """
    info = info or {}
    block, states = info.get("ddtree"), info.get("internal_states")
    cap = block.get("full_context_requests") if isinstance(block, Mapping) else None
    if cap is None and isinstance(states, Sequence) and states and isinstance(states[0], Mapping):
        cap = states[0].get("effective_max_running_requests_per_dp")
    if not isinstance(cap, int) or wanted is None or cap >= wanted:
        return None
    return f"memory holds {cap} requests of full context at once, {wanted} were asked to run: beyond {cap} long requests wait"
