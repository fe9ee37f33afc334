"""One request inside the engine: its tokens, how many of them are in the cache, its pages, its counts and its end.

A round hands over the tokens that the target chose; where they end the request is decided here, and what lies behind
that point is cut. Who runs when is left to `scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate, SpecCounts, TokenLogprob
from ddtree_bench.engine.text_stream import TextStream

if TYPE_CHECKING:
    from ddtree_bench.engine.penalties import TokenHistory


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class SequenceState:
    """State of one request; changed by the scheduler (status, pages) and by the engine (the rest).

    Args:
        request: what was asked for.
        max_context: most tokens, prompt and output together.
        eos_token_ids: tokens that end the text unless the request ignores them.
        text: where the output's text grows.
        tokens: prompt and output; once there is output the last one is the root.
        num_cached: leading tokens whose target and drafter cache entries are written.
        pages: pages of the cache, in order of position.
        history: token counts for the penalties; made by the first step that needs them.
    """

    request: GenerationRequest
    max_context: int
    eos_token_ids: frozenset[int]
    text: TextStream
    tokens: list[int] = field(init=False)
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    error: str | None = None
    num_verify_steps: int = 0
    num_accepted: int = 0
    num_draft_tokens: int = 0
    num_cut: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    history: TokenHistory | None = None
    _new_tokens: list[int] = field(default_factory=list)
    _new_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_tokens)
        stop_ids = frozenset(self.request.sampling.stop_token_ids)
        self._stop_ids = stop_ids if self.request.sampling.ignore_eos else stop_ids | self.eos_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_to_prefill(self) -> int:
        """Tokens that must be cached before it decodes: all of the prompt; after a preemption all but the root."""
        return len(self.tokens) - (1 if self.num_output_tokens else 0)

    @property
    def is_prefilled(self) -> bool:
        """True where the next thing it needs is a decoding round."""
        return self.num_output_tokens > 0 and self.num_cached == self.num_to_prefill

    @property
    def root(self) -> int:
        assert self.num_output_tokens > 0, "a root exists once the prompt has given the first token"
        return self.tokens[-1]

    def start_from_prefill(self, token: int, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add the token that the prompt's last position gave: the first root."""
        self._append([token], logprobs)

    def end_verify_step(self, tokens: Sequence[int], *, num_draft_tokens: int, logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Count one verify step and add the accepted tokens and the bonus.

        Args:
            tokens: accepted draft tokens in order, then the bonus.
            num_draft_tokens: draft nodes that were verified.
            logprobs: one entry a token where they were asked for.

        Returns:
            Tokens kept; fewer than given where the request ends inside.
        """
        num_accepted = len(tokens) - 1
        self.num_verify_steps += 1
        self.num_accepted += num_accepted
        self.num_draft_tokens += num_draft_tokens
        self.accepted_histogram.extend([0] * (num_accepted + 1 - len(self.accepted_histogram)))
        self.accepted_histogram[num_accepted] += 1
        num_kept = self._append(tokens, logprobs)
        self.num_cut += len(tokens) - num_kept
        self.num_cached = min(self.num_cached + len(tokens), len(self.tokens))
        return num_kept

    def finish(self, reason: str, *, matched_stop: int | str | None = None, error: str | None = None) -> None:
        """Mark the end; the scheduler takes the pages back."""
        self.finish_reason, self.matched_stop, self.error = reason, matched_stop, error

    def fail_without_choice(self) -> None:
        """End a request for which the target left no token to choose."""
        self.finish("error", error="the target must give a finite logit; it gave none (NaN or all -inf); check weights and dtype")

    def take_update(self) -> GenerationUpdate | None:
        """Return what is new since the last call, None where nothing is."""
        if not self._new_tokens and self.finish_reason is None:
            return None
        text = self._final_text() if self.finish_reason is not None else self.text.take()
        tokens, self._new_tokens = tuple(self._new_tokens), []
        logprobs, self._new_logprobs = tuple(self._new_logprobs), []
        return GenerationUpdate(
            request_id=self.request.request_id,
            token_ids=tokens,
            text=text,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            error=self.error,
            spec=self.spec_counts(),
        )

    def spec_counts(self) -> SpecCounts:
        """Return the counts so far."""
        return SpecCounts(
            num_verify_steps=self.num_verify_steps,
            num_accepted=self.num_accepted,
            num_draft_tokens=self.num_draft_tokens,
            num_cut=self.num_cut,
            accepted_histogram=tuple(self.accepted_histogram),
        )

    def _final_text(self) -> str:
        is_cut_by_text = isinstance(self.matched_stop, str)
        return self.text.drop_unfinished() if is_cut_by_text else self.text.drain()

    def _append(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
        """Add tokens up to the one that ends the request; return how many were added."""
        for index, token in enumerate(tokens):
            self.tokens.append(token)
            self._new_tokens.append(token)
            self._new_logprobs.extend(logprobs[index : index + 1])
            self._check_end(token)
            if self.finish_reason is not None:
                return index + 1
        return len(tokens)

    def _check_end(self, token: int) -> None:
        """A stop is looked for before the length, so a stop that is the last allowed token counts as a stop."""
        if token in self._stop_ids:
            self.finish("stop", matched_stop=token)
            return
        matched = self.text.push(token)
        if matched is not None:
            self.finish("stop", matched_stop=matched)
        elif self.num_output_tokens >= self.request.sampling.max_tokens or len(self.tokens) >= self.max_context:
            self.finish("length")
