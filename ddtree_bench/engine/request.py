"""What a caller hands to the engine and gets back: the border between the server and the engine.

Token ids are plain ints, times are not kept here. Counts follow DESIGN section 4.4:
output_tokens = 1 (from prefill) + num_accepted + num_verify_steps - num_cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Order of use: penalties, temperature, top_k, top_p, min_p. temperature 0 is the argmax. top_k 0 means all tokens.
    `logprobs`: None, or how many alternatives to report per emitted token (0: the token's own only), from the target's
    log-softmax before temperature and penalties.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def check(condition: bool, name: str, must: str) -> None:
            if not condition:
                raise ValueError(f"{name} must be {must}; given {getattr(self, name)!r}")

        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "finite and at least 0")
        check(self.top_k >= 0, "top_k", "at least 0 (0 means all tokens)")
        check(0 < self.top_p <= 1, "top_p", "over 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "greater than 0")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(all(self.stop), "stop", "strings that are not empty")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "between 0 and 20")

    @property
    def has_penalties(self) -> bool:
        """True where the choice at a node depends on the tokens before it beyond the model itself."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request: prompt as token ids and how to continue it."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class SpecCounts:
    """Speculation of one request so far. `accepted_histogram[i]` counts verify steps that walked i draft tokens."""

    num_verify_steps: int = 0
    num_accepted: int = 0
    num_draft_tokens: int = 0
    num_cut: int = 0
    accepted_histogram: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of an emitted token and its best alternatives as (token, log-probability).

    `top_logit` is the target's highest logit there, before log-softmax: its size tells how coarse the arithmetic was.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    top_logit: float | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationUpdate:
    """What one round added to a request. `text` is whole characters only; held-back bytes come later.

    finish_reason: None while it runs; "stop" (eos, stop id or stop string), "length" (max_tokens or the model's context),
    "abort", or "error" (then `error` says why).
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    error: str | None = None
    spec: SpecCounts = field(default_factory=SpecCounts)
