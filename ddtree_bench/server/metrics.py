"""Counts of the server since it started, and their Prometheus form under the names that vLLM and SGLang use.

Counters are never reset: a window is the difference of two readings. The server's own first generation is not counted.
In mode plain no draft is proposed, so the counters of speculation stay at 0 and `ddtree:verify_steps_total` alone moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ddtree_bench.engine.request import GenerationUpdate, SpecCounts

WINDOW_UPDATES = 40  # SGLang's gauges cover its last 40 decode steps


class EngineStats(Protocol):
    """What the engine tells of itself after each round."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_total_pages(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


@dataclass
class Counters:
    """Totals over all counted requests; fed with updates, each of which holds the counts of its request so far."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_verify_steps: int = 0
    num_accepted: int = 0
    num_draft_tokens: int = 0
    num_cut: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    _window: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_UPDATES))
    _last: dict[str, GenerationUpdate] = field(default_factory=dict)

    def observe(self, update: GenerationUpdate) -> None:
        """Add what is new in an update of a request."""
        last = self._last.get(update.request_id)
        before = SpecCounts() if last is None else last.spec
        spec = update.spec
        if last is None:
            self.num_prompt_tokens += update.num_prompt_tokens
        self.num_output_tokens += update.num_output_tokens - (0 if last is None else last.num_output_tokens)
        steps, accepted = spec.num_verify_steps - before.num_verify_steps, spec.num_accepted - before.num_accepted
        drafted = spec.num_draft_tokens - before.num_draft_tokens
        self.num_verify_steps += steps
        self.num_accepted += accepted
        self.num_draft_tokens += drafted
        self.num_cut += spec.num_cut - before.num_cut
        new = [now - old for now, old in zip_longest(spec.accepted_histogram, before.accepted_histogram, fillvalue=0)]
        self.accepted_histogram = [a + b for a, b in zip_longest(self.accepted_histogram, new, fillvalue=0)]
        if steps:
            self._window.append((steps, accepted, drafted))
        if update.finish_reason is None:
            self._last[update.request_id] = update
        else:
            self._last.pop(update.request_id, None)
            self.finished[update.finish_reason] = self.finished.get(update.finish_reason, 0) + 1

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed in a verify step since the start, pooled, bonus included; None before the first step."""
        return 1 + self.num_accepted / self.num_verify_steps if self.num_verify_steps else None

    @property
    def recent(self) -> tuple[float, float]:
        """Acceptance length and acceptance rate of the last updates, pooled; 0 where there is none, as SGLang has it."""
        steps, accepted, drafted = (sum(column) for column in zip(*self._window, strict=True)) if self._window else (0, 0, 0)
        return (1 + accepted / steps if steps else 0.0, accepted / drafted if drafted else 0.0)

    @property
    def accepted_per_position(self) -> list[int]:
        """Verify steps that accepted the draft token at depth 1, 2, …"""
        histogram = self.accepted_histogram
        return [sum(histogram[depth:]) for depth in range(1, len(histogram))]


class ServerCollector(Collector):
    """Turns counters and the engine's stats into metric families at the moment of a scrape.

    Args:
        counters: the totals.
        read_stats: the engine's newest stats, None while it loads.
        model_id: value of the label model_name.
        num_draft_tokens: most draft tokens of a verify step; also how many positions are listed from the start.
        max_depth: deepest draft token.
    """

    def __init__(
        self, counters: Counters, read_stats: Callable[[], Any], *, model_id: str, num_draft_tokens: int, max_depth: int
    ) -> None:
        self.counters = counters
        self.read_stats = read_stats
        self.model_id = model_id
        self.num_draft_tokens = num_draft_tokens
        self.max_depth = max_depth

    def collect(self) -> Iterator[Metric]:
        yield from self._vllm()
        yield from self._sglang()
        yield from self._own()
        stats = self.read_stats()
        if stats is not None:
            yield from self._memory(stats)

    def _counter(self, name: str, text: str, value: float, **labels: str) -> Metric:
        return self._counters(name, text, [(labels, value)])

    def _counters(self, name: str, text: str, rows: Iterable[tuple[dict[str, str], float]]) -> Metric:
        rows = list(rows)
        names = ["model_name", *(rows[0][0] if rows else ())]
        family = CounterMetricFamily(name, text, labels=names)
        for labels, value in rows:
            family.add_metric([self.model_id, *labels.values()], value)
        return family

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
        family.add_metric([self.model_id, *labels.values()], value)
        return family

    def _vllm(self) -> Iterator[Metric]:
        counters = self.counters
        num_drafts = counters.num_verify_steps if self.num_draft_tokens else 0
        totals = {
            "prompt_tokens": ("Prompt tokens of requests that began.", counters.num_prompt_tokens),
            "generation_tokens": ("Tokens generated.", counters.num_output_tokens),
            "spec_decode_num_drafts": ("Verify steps that held a draft.", num_drafts),
            "spec_decode_num_draft_tokens": ("Draft tokens verified, the root not counted.", counters.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Draft tokens accepted, the bonus not counted.", counters.num_accepted),
        }
        for name, (text, value) in totals.items():
            yield self._counter(f"vllm:{name}", text, value, engine="0")
        accepted = counters.accepted_per_position
        positions = range(max(self.max_depth, len(accepted)))
        rows = [({"engine": "0", "position": str(i)}, accepted[i] if i < len(accepted) else 0) for i in positions]
        text = "Verify steps that accepted the draft token at this depth (position 0 is depth 1)."
        yield self._counters("vllm:spec_decode_num_accepted_tokens_per_pos", text, rows)
        finished = [({"engine": "0", "finished_reason": reason}, count) for reason, count in counters.finished.items()]
        yield self._counters("vllm:request_success", "Requests that ended, by reason.", finished)

    def _sglang(self) -> Iterator[Metric]:
        counters, rank = self.counters, {"tp_rank": "0"}
        length, rate = counters.recent
        num_drafts = counters.num_verify_steps if self.num_draft_tokens else 0
        yield self._counter("sglang:prompt_tokens", "Prompt tokens of requests that began.", counters.num_prompt_tokens)
        yield self._counter("sglang:generation_tokens", "Tokens generated.", counters.num_output_tokens)
        yield self._counter("sglang:num_requests", "Requests that ended.", sum(counters.finished.values()))
        yield self._counter("sglang:spec_verify_calls", "Verify steps, one a request and round.", num_drafts)
        speculates = self.num_draft_tokens > 0
        text = f"Tokens committed in a verify step, bonus included, pooled over the last {WINDOW_UPDATES} steps of requests."
        yield self._gauge("sglang:spec_accept_length", text, length if speculates else 0, **rank)
        yield self._gauge("sglang:spec_accept_rate", "Accepted over proposed draft tokens, same steps.", rate, **rank)
        width = self.num_draft_tokens + 1 if speculates else 0
        yield self._gauge("sglang:spec_num_draft_tokens", "Verify width: the root and its draft nodes.", width, **rank)

    def _own(self) -> Iterator[Metric]:
        counts = self.counters
        yield self._counter("ddtree:verify_steps", "Verify steps in any mode, plain decoding included.", counts.num_verify_steps)
        yield self._counter("ddtree:cut_tokens", "Committed tokens that stop or length rules cut.", counts.num_cut)

    def _memory(self, stats: EngineStats) -> Iterator[Metric]:
        used = 1 - stats.num_free_pages / stats.num_total_pages if stats.num_total_pages else 0.0
        engine, rank = {"engine": "0"}, {"tp_rank": "0"}
        yield self._gauge("vllm:num_requests_running", "Requests that run.", stats.num_running, **engine)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting, **engine)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 1 is all.", used, **engine)
        yield self._gauge("sglang:num_running_reqs", "Requests that run.", stats.num_running, **rank)
        yield self._gauge("sglang:num_queue_reqs", "Requests that wait.", stats.num_waiting, **rank)
        yield self._gauge("sglang:token_usage", "Share of KV pages in use, 1 is all.", used, **rank)
        yield self._gauge("ddtree:kv_pages_free", "KV pages that are free.", stats.num_free_pages)
        yield self._gauge("ddtree:kv_pages_total", "KV pages of the pool.", stats.num_total_pages)
        yield self._counter("ddtree:preemptions", "Requests that were put back for lack of pages.", stats.num_preemptions)
        yield self._counter("vllm:num_preemptions", "Requests that were put back.", stats.num_preemptions, engine="0")


def exposition(collector: ServerCollector) -> bytes:
    """Return the text that a scrape gets."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
