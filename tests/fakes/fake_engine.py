"""An engine of scripted replies behind the interface of the engine's handle: no model, no torch.

A reply is a list of rounds; a round is the text that it commits, one token a character (the token is its code point modulo
the vocabulary, so that texts can be told apart); an empty round is one token whose text is held back. `round_s` makes
rounds slow; `gate` holds them back until it is set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate, SpecCounts, TokenLogprob
from ddtree_bench.errors import ServerError

VOCAB_SIZE = 1000
DEFAULT_ROUNDS = ("a", "bcd", "e", "fgh")


@dataclass(frozen=True, kw_only=True)
class FakeStats:
    """The same names as the engine's stats."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_total_pages: int = 0
    num_preemptions: int = 0


@dataclass
class FakeSequence:
    request: GenerationRequest
    rounds: list[str]
    num_output: int = 0
    spec: SpecCounts = field(default_factory=SpecCounts)
    num_rounds: int = 0
    is_aborted: bool = False


class FakeTokenizer:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB_SIZE for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in ids)

    def apply_chat_template(self, messages: Sequence[dict[str, object]], add_generation_prompt: bool = True) -> str:
        if any(message["role"] == "refused" for message in messages):
            raise ValueError("messages must suit the checkpoint's chat template; it answered 'no'; change them")
        return "".join(f"<{message['role']}>{message['content']}\n" for message in messages) + "<assistant>"


class FakeEngine:
    """Commits one round of its script to every request in each step; `num_draft` draft tokens are proposed in each.

    `launch` gives it to a server: it is its own handle, and its thread steps while there is work.
    """

    def __init__(
        self,
        rounds: Sequence[str] | Callable[[GenerationRequest], Sequence[str]] = DEFAULT_ROUNDS,
        *,
        num_draft: int = 5,
        num_pages: int = 64,
        round_s: float = 0.0,
    ) -> None:
        self.rounds = rounds
        self.max_context = 200
        self.num_draft = num_draft
        self.num_pages = num_pages
        self.round_s = round_s
        self.gate = threading.Event()
        self.gate.set()
        self.sequences: dict[str, FakeSequence] = {}
        self.seen: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.is_closed = False
        self.fail_at_step: int | None = None
        self.fail_request: str | None = None
        self._lock = threading.Condition()

    def launch(
        self, on_updates: Callable[[Sequence[GenerationUpdate]], None], on_failure: Callable[[ServerError], None]
    ) -> FakeEngine:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, args=(on_updates, on_failure), daemon=True)
        self._thread.start()
        return self

    @property
    def engine(self) -> FakeEngine:
        return self

    def refusal(self, request: GenerationRequest) -> str | None:
        if len(request.prompt_tokens) > 100:
            return f"the prompt must have 1 to 100 tokens; it has {len(request.prompt_tokens)}; shorten it"
        return None

    def submit(self, request: GenerationRequest) -> None:
        rounds = list(self.rounds(request) if callable(self.rounds) else self.rounds)
        if request.request_id.startswith("probe-"):
            rounds = ["x", "y"]
        with self._lock:
            self.seen.append(request)
            self.sequences[request.request_id] = FakeSequence(request, rounds)
            self._lock.notify_all()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            if request_id in self.sequences:
                self.sequences[request_id].is_aborted = True

    def stats(self) -> FakeStats:
        used = len(self.sequences)
        return FakeStats(num_running=used, num_free_pages=self.num_pages - used, num_total_pages=self.num_pages)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._lock.notify_all()
        self.gate.set()
        self._thread.join(10)

    def _run(self, on_updates: Callable[[Sequence[GenerationUpdate]], None], on_failure: Callable[[ServerError], None]) -> None:
        while True:
            with self._lock:
                while not self.sequences and not self.is_closed:
                    self._lock.wait()
            if self.is_closed:
                return
            self.gate.wait(10)
            time.sleep(self.round_s)
            self.num_steps += 1
            if self.fail_at_step is not None and self.num_steps >= self.fail_at_step:
                on_failure(ServerError("rank 1 died", kind="rank_died"))
                return
            with self._lock:
                updates = [self._advance(sequence) for sequence in self.sequences.values()]
                for update in updates:
                    if update.finish_reason is not None:
                        del self.sequences[update.request_id]
            on_updates(updates)

    def _advance(self, sequence: FakeSequence) -> GenerationUpdate:
        request, is_prefill = sequence.request, sequence.num_rounds == 0
        if sequence.is_aborted:
            return GenerationUpdate(
                request_id=request.request_id,
                token_ids=(),
                text="",
                num_prompt_tokens=len(request.prompt_tokens),
                num_output_tokens=sequence.num_output,
                finish_reason="abort",
                spec=sequence.spec,
            )
        text = sequence.rounds[sequence.num_rounds]
        sequence.num_rounds += 1
        ids = tuple(ord(c) % VOCAB_SIZE for c in text) or (0,)
        room = request.sampling.max_tokens - sequence.num_output
        num_cut, text, ids = max(0, len(ids) - room), text[:room], ids[:room]
        sequence.num_output += len(ids)
        if not is_prefill:
            sequence.spec = self._count(sequence.spec, len(ids) + num_cut - 1, num_cut)
        finish = None
        if sequence.num_output >= request.sampling.max_tokens:
            finish = "length"
        elif sequence.num_rounds == len(sequence.rounds):
            finish = "stop"
        error = None
        if self.fail_request == request.request_id and not is_prefill:
            finish, error = "error", "logits are not finite"
        num_top = request.sampling.logprobs
        return GenerationUpdate(
            request_id=request.request_id,
            token_ids=ids,
            text=text,
            num_prompt_tokens=len(request.prompt_tokens),
            num_output_tokens=sequence.num_output,
            logprobs=() if num_top is None else tuple(self._logprob(token, num_top) for token in ids),
            finish_reason=finish,
            matched_stop=7 if finish == "stop" else None,
            error=error,
            spec=sequence.spec,
        )

    def _logprob(self, token: int, num_top: int) -> TokenLogprob:
        top = [(token, -0.5), (token + 1, float("-inf"))]
        return TokenLogprob(token=token, logprob=-0.5, top=tuple(top[:num_top]))

    def _count(self, spec: SpecCounts, num_accepted: int, num_cut: int) -> SpecCounts:
        histogram = list(spec.accepted_histogram) + [0] * (num_accepted + 1 - len(spec.accepted_histogram))
        histogram[num_accepted] += 1
        return SpecCounts(
            num_verify_steps=spec.num_verify_steps + 1,
            num_accepted=spec.num_accepted + num_accepted,
            num_draft_tokens=spec.num_draft_tokens + self.num_draft,
            num_cut=spec.num_cut + num_cut,
            accepted_histogram=tuple(histogram),
        )
