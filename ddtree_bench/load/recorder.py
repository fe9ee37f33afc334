"""Builds the record of one request from (time, bytes) pairs; knows the protocols and nothing of sockets.

Three dialects end in one record: OpenAI chat, OpenAI completions, and SGLang's native /generate with cumulative text.
Speculation counts are read where SGLang (`meta_info`, `sglext.spec_tokens_details`) and vLLM
(`metrics.speculative_decoding`) put them. Error kinds are those of DESIGN section 4.6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_bench.load.sse import SseDecoder, SseEvent
from ddtree_bench.records import RequestRecord, tokens_of_counts

_MAX_BODY_BYTES = 4096  # of a body that is no stream, kept for its message
_MAX_MESSAGE_CHARS = 500


class StreamRecorder:
    """Takes the body of one reply as it arrives and gives its `RequestRecord`.

    Args:
        endpoint: chat, completions or generate.
        request_id, prompt_id, class_: names kept in the record.
        planned_s, sent_s: seconds on the client's monotonic clock; every time fed later is on the same clock.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        request_id: str = "request",
        prompt_id: str = "prompt",
        class_: str | None = None,
        planned_s: float | None = None,
        sent_s: float | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._names = {"request_id": request_id, "prompt_id": prompt_id, "class_": class_}
        self._planned_s, self.sent_s = planned_s, sent_s
        self._decoder = SseDecoder()
        self._head = bytearray()
        self._num_bytes = 0
        self._num_events = 0
        self._is_done = False  # [DONE] came
        self._error: tuple[str, str] | None = None
        self._first_token_s: float | None = None
        self._first_answer_s: float | None = None
        self._last_token_s: float | None = None
        self._done_s: float | None = None
        self._chunks: list[tuple[float, int | None]] = []  # arrival, cumulative tokens or None
        self._text: list[str] = []
        self._cumulative_text = ""
        self._reasoning: list[str] = []
        self._finish_reason: str | None = None
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._has_other_choices = False
        self._has_final_usage = False
        self._spec: dict[str, Any] = {}
        self._warnings: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing that comes later can change the record: [DONE] or an error was seen."""
        return self._is_done or self._error is not None

    def feed(self, t_s: float, data: bytes) -> None:
        """Take bytes that arrived at `t_s` (seconds)."""
        if self.is_over or not data:
            return
        self._num_bytes += len(data)
        if len(self._head) < _MAX_BODY_BYTES:
            self._head += data[: _MAX_BODY_BYTES - len(self._head)]
        self._done_s = t_s
        for event in self._decoder.feed(data):
            self._take_event(t_s, event)

    def finish(self, t_s: float) -> RequestRecord:
        """Return the record of a body that ended at `t_s` without a transport error."""
        if not self.is_over:
            last = self._decoder.finish()
            if last is not None and _is_whole(last):
                self._take_event(self._done_s if self._done_s is not None else t_s, last)
        if self._error is None:
            self._error = self._find_fault()
        return self._build(t_s)

    def fail(self, kind: str, message: str, t_s: float) -> RequestRecord:
        """Return the record of a request that the transport ended; what came before [DONE] or an error stands."""
        if not self.is_over:
            self._error = (kind, message)
            self._done_s = t_s
        return self.finish(t_s)

    def refuse(self, status: int, body: bytes, t_s: float) -> RequestRecord:
        """Return the record of a reply whose HTTP status is not 200."""
        self._done_s = t_s
        self._error = (f"http_{status}", _error_text(body) or f"HTTP {status} with an empty body")
        return self._build(t_s)

    # events

    def _take_event(self, t_s: float, event: SseEvent) -> None:
        if self.is_over:
            return
        self._num_events += 1
        if event.data.strip() == "[DONE]":
            self._is_done = True
            return
        if event.event == "error":
            self._error = ("server", _error_text(event.data.encode()) or "event: error without data")
            return
        try:
            message = json.loads(event.data)
        except json.JSONDecodeError as error:
            self._error = ("protocol", f"an event's data must be JSON; {error}: {event.data[:200]!r}")
            return
        if not isinstance(message, dict):
            self._error = ("protocol", f"an event's data must be a JSON object; given {event.data[:200]!r}")
            return
        if message.get("error") or message.get("object") == "error":
            self._error = ("server", _error_text(event.data.encode()))
            return
        if self._endpoint == "generate":
            self._take_generate(t_s, message)
        else:
            self._take_openai(t_s, message)

    def _take_openai(self, t_s: float, message: Mapping[str, Any]) -> None:
        usage = message.get("usage")
        cumulative = self._take_usage(usage) if isinstance(usage, Mapping) else None
        self._take_spec(message)
        choices = message.get("choices")
        if cumulative is not None and not choices:
            self._has_final_usage = True  # a usage beside a choice may be a running count, which ends nothing
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            if choice.get("index") or 0:
                self._has_other_choices = True
                continue
            self._take_spec(choice)
            if self._endpoint == "chat":
                self._take_delta(t_s, choice.get("delta") or choice.get("message") or {}, cumulative)
            else:
                self._take_content(t_s, answer=choice.get("text") or "", cumulative=cumulative)
            if choice.get("finish_reason"):
                self._finish(str(choice["finish_reason"]))

    def _take_delta(self, t_s: float, delta: Mapping[str, Any], cumulative: int | None) -> None:
        self._take_content(
            t_s,
            answer=delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
            has_call=bool(delta.get("tool_calls") or delta.get("function_call") or delta.get("refusal")),
            cumulative=cumulative,
        )

    def _take_generate(self, t_s: float, message: Mapping[str, Any]) -> None:
        if message.get("index") or 0:
            self._has_other_choices = True
            return
        meta = message.get("meta_info")
        meta = meta if isinstance(meta, Mapping) else {}
        self._take_spec(message)
        cumulative = _count(meta.get("completion_tokens"))
        if cumulative is not None:
            self._output_tokens = cumulative
        self._prompt_tokens = _count(meta.get("prompt_tokens")) or self._prompt_tokens
        text = message.get("text") or ""
        if text.startswith(self._cumulative_text):
            answer = text[len(self._cumulative_text) :]
            self._cumulative_text = text
        elif self._cumulative_text.startswith(text):  # a stop string was trimmed from what had been sent, or no text field
            answer = ""
            if text:
                self._cumulative_text = text
                self._text = [text]
        else:
            answer = text  # a server that streams increments
            self._cumulative_text += text
        self._take_content(t_s, answer=answer, cumulative=cumulative)
        reason = meta.get("finish_reason")
        if isinstance(reason, Mapping):
            self._finish(str(reason.get("type")), str(reason.get("message") or ""))
        elif reason:
            self._finish(str(reason))

    def _take_content(
        self, t_s: float, *, answer: str, reasoning: str = "", has_call: bool = False, cumulative: int | None = None
    ) -> None:
        if not (answer or reasoning or has_call):
            return
        self._text.append(answer)
        self._reasoning.append(reasoning)
        self._chunks.append((t_s, cumulative))
        if self._first_token_s is None:
            self._first_token_s = t_s
        if self._first_answer_s is None and (answer or has_call):
            self._first_answer_s = t_s
        self._last_token_s = t_s

    def _finish(self, reason: str, message: str = "") -> None:
        self._finish_reason = reason
        if reason in ("abort", "error"):
            self._error = ("server", message or f"the server ended the reply with finish_reason {reason!r}")

    def _take_usage(self, usage: Mapping[str, Any]) -> int | None:
        prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        self._prompt_tokens = prompt if prompt is not None else self._prompt_tokens
        self._output_tokens = completion if completion is not None else self._output_tokens
        return completion

    def _take_spec(self, message: Mapping[str, Any]) -> None:
        """Keep the newest speculation counts; both dialects end in the record's own names."""
        meta = message.get("meta_info")
        if not isinstance(meta, Mapping):
            extension = message.get("sglext")
            meta = extension.get("spec_tokens_details") if isinstance(extension, Mapping) else None
        if isinstance(meta, Mapping):
            self._keep_spec(
                num_verify_steps=meta.get("spec_verify_ct"),
                num_accepted=meta.get("spec_num_correct_drafts"),
                num_draft_tokens=meta.get("spec_num_proposed_drafts"),
                accepted_histogram=meta.get("spec_correct_drafts_histogram"),
                num_cut=meta.get("num_cut"),
            )
        metrics = message.get("metrics")
        vllm = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
        if isinstance(vllm, Mapping):
            self._keep_spec(
                num_verify_steps=vllm.get("num_spec_steps"),
                num_accepted=vllm.get("num_accepted_draft_tokens"),
                num_draft_tokens=vllm.get("num_draft_tokens"),
                accepted_histogram=vllm.get("acceptance_histogram"),
            )

    def _keep_spec(self, **counts: Any) -> None:
        self._spec.update({name: value for name, value in counts.items() if value is not None})

    # the end

    def _find_fault(self) -> tuple[str, str] | None:
        """Return what is wrong with a body that ended in order, or None."""
        has_content = bool(self._chunks)
        is_finished = self._is_done or self._finish_reason is not None or self._has_final_usage
        if self._num_events == 0 and bytes(self._head).strip():
            return self._name_non_stream()
        if not has_content:
            return ("empty", "the reply ended without any content")
        if not is_finished:
            return ("truncated", "the reply ended with no finish_reason, usage or [DONE]")
        return None

    def _name_non_stream(self) -> tuple[str, str] | None:
        head = bytes(self._head)
        lines = [line for line in head.splitlines() if line.strip()]
        if all(line.startswith((b":", b"id:", b"event:", b"retry:")) for line in lines):
            return ("empty", "the reply held comments and no event")
        if any(line.startswith(b"data:") for line in lines) or b"data:".startswith(lines[-1]):
            return ("truncated", "the reply ended inside its first event")
        try:
            message = json.loads(head)
        except ValueError:
            message = None
        if isinstance(message, dict) and (message.get("error") or message.get("object") == "error"):
            return ("server", _error_text(head))
        shown = head[:200].decode("utf-8", errors="replace")
        return ("protocol", f"the body must be server-sent events; it begins {shown!r}")

    def _build(self, t_s: float) -> RequestRecord:
        kind, message = self._error or (None, None)
        output_tokens = self._output_tokens
        if self._has_other_choices:
            output_tokens = None
            self._warnings.append("usage counts all choices of the reply and only choice 0 is recorded: output_tokens is unknown")
        return RequestRecord(
            **self._names,  # type: ignore[arg-type]
            planned_s=self._planned_s,
            sent_s=self.sent_s,
            first_token_s=self._first_token_s,
            first_answer_s=self._first_answer_s,
            last_token_s=self._last_token_s,
            done_s=self._done_s if self._done_s is not None else t_s,
            chunks=self._counted_chunks(),
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            finish_reason=self._finish_reason,
            prompt_tokens=self._prompt_tokens,
            output_tokens=output_tokens,
            token_source=None if output_tokens is None else "usage",
            outcome="ok" if kind is None else "error",
            error_kind=kind,
            error_message=None if message is None else message[:_MAX_MESSAGE_CHARS],
            **self._checked_spec(None if kind else output_tokens),
            warnings=tuple(self._warnings),
        )

    def _counted_chunks(self) -> list[list[float | int | None]]:
        """Return [arrival, tokens] of every content chunk; tokens are known only if every chunk told a cumulative count."""
        totals = [total for _, total in self._chunks]
        known = [total for total in totals if total is not None]
        if len(known) < len(totals) or self._has_other_choices:
            return [[t_s, None] for t_s, _ in self._chunks]
        tokens = [total - before for before, total in zip([0, *known[:-1]], known, strict=True)] if known else []
        if any(count < 0 for count in tokens):
            self._warnings.append("the server's running token count went down: tokens of a chunk are unknown")
            return [[t_s, None] for t_s, _ in self._chunks]
        return [[t_s, count] for (t_s, _), count in zip(self._chunks, tokens, strict=True)]

    def _checked_spec(self, output_tokens: int | None) -> dict[str, Any]:
        """Return the counts that are whole and agree with each other; what does not is left out with a warning."""
        names = ("num_verify_steps", "num_accepted", "num_draft_tokens", "num_cut")
        counts: dict[str, Any] = {name: _count(self._spec.get(name)) for name in names}
        for name in names:
            if name in self._spec and counts[name] is None:
                self._warnings.append(f"the server's {name} must be a count; given {self._spec[name]!r}")
        counts["accepted_histogram"] = self._checked_histogram(counts["num_verify_steps"], counts["num_accepted"])
        told = tokens_of_counts(counts["num_verify_steps"], counts["num_accepted"], counts["num_cut"])
        if output_tokens is not None and told not in (None, output_tokens):
            self._warnings.append(f"the server's counts must give its {output_tokens} output tokens; they give {told}")
            counts["num_cut"] = None
        return counts

    def _checked_histogram(self, num_steps: int | None, num_accepted: int | None) -> list[int] | None:
        given = self._spec.get("accepted_histogram")
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            return None
        histogram = [count for value in given if (count := _count(value)) is not None]
        steps, weight = sum(histogram), sum(i * n for i, n in enumerate(histogram))
        agrees = len(histogram) == len(given) and num_steps in (None, steps) and num_accepted in (None, weight)
        if not agrees:
            self._warnings.append(
                f"the server's accepted histogram must add up to {num_steps} steps and {num_accepted} accepted tokens; "
                f"given {list(given)}"
            )
        return histogram if agrees else None


def _is_whole(event: SseEvent) -> bool:
    """Whether an event without its blank line was cut: its data must be [DONE] or JSON."""
    if event.data.strip() == "[DONE]" or event.event == "error":
        return True
    try:
        json.loads(event.data)
    except json.JSONDecodeError:
        return False
    return True


def _count(value: Any) -> int | None:
    """Return a count that is one (a whole number of at least 0), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0 or int(value) != value:
        return None
    return int(value)


def _error_text(body: bytes) -> str:
    """Return the message of an error body: the servers' usual JSON shapes, else its text."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        message: Any = json.loads(text)
    except ValueError:
        return text[:_MAX_MESSAGE_CHARS]
    for _ in range(3):
        if not isinstance(message, Mapping):
            break
        inner = next((message[key] for key in ("error", "message", "detail") if message.get(key)), None)
        if inner is None:
            break
        message = inner
    return (message if isinstance(message, str) else json.dumps(message, ensure_ascii=False))[:_MAX_MESSAGE_CHARS]
