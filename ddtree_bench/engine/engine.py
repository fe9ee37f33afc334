"""The engine of one rank: requests in, updates out, one scheduling step at a time.

Every rank of a tensor-parallel group runs one, is given the same requests and aborts in the same order, and steps the
same number of times; `worker` sees to that. Nothing here talks to a client or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ddtree_bench.engine.memory import plan_context, plan_pages
from ddtree_bench.engine.page_pool import PagePool
from ddtree_bench.engine.prefill import run_prefill
from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate
from ddtree_bench.engine.round import run_round
from ddtree_bench.engine.runner import Runner
from ddtree_bench.engine.scheduler import Scheduler, Step
from ddtree_bench.engine.sequence import SequenceState
from ddtree_bench.engine.settings import EngineSettings
from ddtree_bench.engine.stage_clock import StageClock
from ddtree_bench.engine.stats import Counters, EngineStats, SequenceCounts
from ddtree_bench.engine.text_stream import TextStream
from ddtree_bench.models.parallel import Parallel
from ddtree_bench.models.tokenizer import Tokenizer, read_json


class Engine:
    """Run requests through prefill and decoding rounds.

    Args:
        settings: the same on every rank.
        parallel: this rank; None is the only one.

    Raises:
        ValueError: model, drafter, setting and memory do not fit together.
    """

    def __init__(self, settings: EngineSettings, parallel: Parallel | None = None) -> None:
        self.settings = settings
        self.parallel = parallel or Parallel.single()
        self.runner = Runner(settings, self.parallel)
        self.tokenizer = _load_tokenizer(self.runner)
        self.eos_token_ids = _eos_token_ids(self.runner, self.tokenizer)
        model_context = self.runner.target.config.max_position_embeddings
        num_pages = plan_pages(
            settings,
            self.parallel,
            device=self.runner.device,
            bytes_per_token=self.runner.cache_bytes_per_token(),
            model_context=model_context,
        )
        self.max_context = plan_context(settings, num_pages=num_pages, model_context=model_context)
        self.runner.allocate_caches(num_pages)
        self.scheduler = Scheduler(
            PagePool(num_pages, settings.page_size),
            verify_width=self.runner.setting.verify_width,
            max_running=settings.max_running_requests,
            max_prefill_tokens=settings.max_prefill_tokens,
        )
        self._counters = Counters()
        self._clock = StageClock()
        self._ended: list[SequenceState] = []

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def has_work(self) -> bool:
        """True where a step would do something."""
        return self.scheduler.has_work or bool(self._ended)

    def refusal(self, request: GenerationRequest) -> str | None:
        """Return why a request can never run here, None where it can."""
        num_tokens, most = len(request.prompt_tokens), self.max_context - 1
        if not 1 <= num_tokens <= most:
            return f"the prompt must have 1 to {most} tokens; it has {num_tokens}; shorten it or raise max_context"
        outside = [token for token in request.prompt_tokens if not 0 <= token < self.vocab_size]
        if outside:
            return f"prompt tokens must be in [0, {self.vocab_size}); given {outside[0]}; use the model's tokenizer"
        if request.sampling.stop and self.tokenizer is None:
            return f"stop strings must have a tokenizer; {self.runner.model_folder} has none; use stop_token_ids"
        return None

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; one that can never run ends in the next step with finish_reason "error".

        Raises:
            ValueError: a request of this id has not finished yet.
        """
        if self.scheduler.find(request.request_id) is not None:
            raise ValueError(f"request_id must be new; {request.request_id!r} is still running; give each request its own")
        sequence = self._sequence_of(request)
        refusal = self.refusal(request)
        if refusal is None:
            self._counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.scheduler.add(sequence)
        else:
            sequence.finish("error", error=refusal)
            self._ended.append(sequence)

    def abort(self, request_id: str) -> None:
        """End a request in the next step; unknown and finished ones are left alone."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            sequence.finish("abort")
            self.scheduler.remove(sequence)
            self._ended.append(sequence)

    @torch.inference_mode()
    def step(self) -> list[GenerationUpdate]:
        """Run one prefill batch or one decoding round and return what is new, in order of admission.

        Raises:
            RanksDisagreeError: the ranks' states differ; the engine must not be used again.
        """
        with self._clock.step():
            return self._step()

    def _step(self) -> list[GenerationUpdate]:
        ended, self._ended = self._ended, []
        step = self.scheduler.next_step()
        touched = [chunk.sequence for chunk in step.prefill] or list(step.decode)
        before = [SequenceCounts.of(sequence) for sequence in touched]
        self._run(step)
        for counts, sequence in zip(before, touched, strict=True):
            self._counters.add_step(counts, sequence)
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
        updates = [update for sequence in (*ended, *touched) if (update := sequence.take_update()) is not None]
        for update in updates:
            if update.finish_reason is not None:
                self._counters.add_end(update.finish_reason)
        return updates

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        counters, pages = vars(self._counters), self.scheduler.pages
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_free_pages=pages.num_free,
            num_total_pages=pages.num_pages,
            page_size=pages.page_size,
            num_preemptions=self.scheduler.num_preemptions,
            stage_seconds=dict(self._clock.seconds),
            step_seconds=self._clock.step_seconds,
            **{**counters, "accepted_per_depth": tuple(self._counters.accepted_per_depth)},
        )

    def generate(
        self, requests: Sequence[GenerationRequest], on_update: Callable[[GenerationUpdate], None] | None = None
    ) -> dict[str, list[GenerationUpdate]]:
        """Run requests to their ends, for callers without a loop of their own; single rank only.

        Returns:
            The updates of each request in order.
        """
        assert self.parallel.world_size == 1, "ranks step together; use worker.launch"
        updates: dict[str, list[GenerationUpdate]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.submit(request)
        while self.has_work:
            for update in self.step():
                updates.setdefault(update.request_id, []).append(update)
                if on_update is not None:
                    on_update(update)
        return updates

    def _run(self, step: Step) -> None:
        number = self._counters.num_rounds + self._counters.num_prefill_steps + 1
        if step.prefill:
            with self._clock.stage("prefill"):
                run_prefill(self.runner, step.prefill, round_number=number)
            self._counters.num_prefill_steps += 1
        elif step.decode:
            run_round(self.runner, step.decode, round_number=number, clock=self._clock)
            self._counters.num_rounds += 1

    def _sequence_of(self, request: GenerationRequest) -> SequenceState:
        """Ranks other than 0 need text only where a stop string decides when a request ends."""
        needs_text = self.tokenizer is not None and (self.parallel.rank == 0 or request.sampling.stop)
        detokenizer = self.tokenizer.detokenizer() if self.tokenizer is not None and needs_text else None
        return SequenceState(
            request=request,
            max_context=self.max_context,
            eos_token_ids=self.eos_token_ids,
            text=TextStream(detokenizer, request.sampling.stop),
        )


def _load_tokenizer(runner: Runner) -> Tokenizer | None:
    """Return the checkpoint's tokenizer; a folder without one is served by token ids alone."""
    return Tokenizer.load(runner.model_folder) if (runner.model_folder / "tokenizer.json").exists() else None


def _eos_token_ids(runner: Runner, tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is not None:
        return frozenset(tokenizer.eos_token_ids)
    eos = read_json(runner.model_folder / "config.json").get("eos_token_id")
    return frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)
