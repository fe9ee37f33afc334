"""Answers in the shapes of OpenAI's completions and chat completions and of SGLang's /generate.

A chunk holds everything that one round committed for one request. Speculation is reported in `meta_info` under SGLang's
names: on /generate where SGLang has it; on OpenAI's endpoints, as an extension, in the choice that ends and beside the usage.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_bench.engine.request import GenerationRequest, GenerationUpdate, TokenLogprob
from ddtree_bench.server.protocol import Call, ServedModel

Json = dict[str, Any]


@dataclass
class Choice:
    """One prompt's answer as it grows; `last` is its newest update."""

    index: int
    request: GenerationRequest
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: GenerationUpdate | None = None
    num_chunks: int = 0

    def add(self, update: GenerationUpdate) -> None:
        self.text += update.text
        self.token_ids.extend(update.token_ids)
        self.logprobs.extend(update.logprobs)
        self.last = update
        self.num_chunks += 1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.last is None else self.last.num_output_tokens

    @property
    def finish_reason(self) -> str | None:
        return None if self.last is None else self.last.finish_reason


def usage(choices: Sequence[Choice]) -> Json:
    """Return OpenAI's usage object over choices."""
    prompt, output = sum(c.num_prompt_tokens for c in choices), sum(c.num_output_tokens for c in choices)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def meta_info(choice: Choice, call: Call, started_s: float) -> Json:
    """Return SGLang's `meta_info` of a choice; speculation is told once it has ended.

    spec_accept_length is completion_tokens / spec_verify_ct, as SGLang defines it: it counts the token from prefill, and what
    the stop and length rules cut is missing. Pool num_correct_drafts and verify_ct for the acceptance length of GLOSSARY.
    """
    meta: Json = {
        "id": choice.request.request_id,
        "finish_reason": sglang_finish(choice),
        "prompt_tokens": choice.num_prompt_tokens,
        "completion_tokens": choice.num_output_tokens,
        "cached_tokens": 0,
        "seed": choice.request.sampling.seed,
    }
    if choice.finish_reason is None or choice.last is None:
        return meta
    spec = choice.last.spec
    meta |= {
        "e2e_latency": time.perf_counter() - started_s,
        "spec_verify_ct": spec.num_verify_steps,
        "spec_num_correct_drafts": spec.num_accepted,
        "spec_num_proposed_drafts": spec.num_draft_tokens,
        "spec_correct_drafts_histogram": list(spec.accepted_histogram),
        "num_cut": spec.num_cut,
    }
    if spec.num_draft_tokens > 0:
        meta["spec_accept_length"] = choice.num_output_tokens / spec.num_verify_steps
        meta["spec_accept_rate"] = spec.num_accepted / spec.num_draft_tokens
    if call.ignored_fields:
        meta["ignored_fields"] = list(call.ignored_fields)
    return meta


def sglang_finish(choice: Choice) -> Json | None:
    """Return SGLang's finish reason, an object that says what matched."""
    last = choice.last
    if last is None or last.finish_reason is None:
        return None
    match last.finish_reason:
        case "stop":
            return {"type": "stop", "matched": last.matched_stop}
        case "length":
            return {"type": "length", "length": last.num_output_tokens}
    return {"type": last.finish_reason, "message": last.error or "the request was aborted"}


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold; OpenAI writes -9999 for what is impossible."""
    return max(logprob, -9999.0)


class Format(ABC):
    """Shape of one endpoint's answers. `started_s` is when the call came, on time.perf_counter."""

    def __init__(self, call: Call, model: ServedModel, started_s: float) -> None:
        self.call = call
        self.model = model
        self.started_s = started_s
        self.created = int(time.time())

    @abstractmethod
    def chunk(self, choice: Choice, update: GenerationUpdate) -> Json:
        """Return the streamed chunk for an update that `choice` already holds."""

    @abstractmethod
    def last_chunk(self, choices: Sequence[Choice]) -> Json | None:
        """Return the chunk after all choices have ended, None for none."""

    @abstractmethod
    def body(self, choices: Sequence[Choice]) -> Any:
        """Return the whole answer at once."""

    def meta_info(self, choice: Choice) -> Json:
        return meta_info(choice, self.call, self.started_s)

    def token_text(self, token: int) -> str:
        tokenizer = self.model.tokenizer
        return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


class OpenAIFormat(Format):
    """What completions and chat completions share."""

    prefix: str
    object_name: str
    chunk_object_name: str

    @abstractmethod
    def choice(self, choice: Choice) -> Json:
        """Return the whole choice without index and finish_reason."""

    @abstractmethod
    def delta(self, choice: Choice, update: GenerationUpdate) -> Json:
        """Return what is new in a choice, without index and finish_reason."""

    def envelope(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": f"{self.prefix}-{self.call.rid}",
            "object": object_name,
            "created": self.created,
            "model": self.model.model_id,
            "choices": choices,
        }

    def chunk(self, choice: Choice, update: GenerationUpdate) -> Json:
        row = {"index": choice.index, **self.delta(choice, update), "finish_reason": update.finish_reason}
        if update.finish_reason is not None:
            row["matched_stop"] = update.matched_stop
            row["meta_info"] = self.meta_info(choice)
        chunk = self.envelope(self.chunk_object_name, [row])
        if self.call.continuous_usage:
            chunk["usage"] = usage([choice])
        elif self.call.include_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self, choices: Sequence[Choice]) -> Json | None:
        if not self.call.include_usage:
            return None
        return self.envelope(self.chunk_object_name, []) | {"usage": usage(choices)} | self.shared_meta_info(choices)

    def body(self, choices: Sequence[Choice]) -> Json:
        rows = [
            {
                "index": choice.index,
                **self.choice(choice),
                "finish_reason": choice.finish_reason,
                "matched_stop": choice.last.matched_stop if choice.last else None,
                "meta_info": self.meta_info(choice),
            }
            for choice in choices
        ]
        return self.envelope(self.object_name, rows) | {"usage": usage(choices)} | self.shared_meta_info(choices)

    def shared_meta_info(self, choices: Sequence[Choice]) -> Json:
        """Return `meta_info` for the top of an answer: only where there is one choice, else each choice has its own."""
        return {"meta_info": self.meta_info(choices[0])} if len(choices) == 1 else {}


class CompletionsFormat(OpenAIFormat):
    """POST /v1/completions."""

    prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"

    def choice(self, choice: Choice) -> Json:
        return {"text": choice.text, "logprobs": self.logprobs(choice, choice.logprobs, 0)}

    def delta(self, choice: Choice, update: GenerationUpdate) -> Json:
        offset = len(choice.text) - len(update.text)
        return {"text": update.text, "logprobs": self.logprobs(choice, update.logprobs, offset)}

    def logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], offset: int) -> Json | None:
        """Return the four parallel lists; a token's text and offset are of the token decoded alone.

        A fifth, `top_logits`, is an extension: the target's highest logit at each token, where the engine tells it.
        """
        if choice.request.sampling.logprobs is None:
            return None
        tokens = [self.token_text(item.token) for item in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        logits = [item.top_logit for item in logprobs if item.top_logit is not None]
        extension = {"top_logits": logits} if len(logits) == len(logprobs) else {}
        return {
            "tokens": tokens,
            "token_logprobs": [finite(item.logprob) for item in logprobs],
            "top_logprobs": [{self.token_text(token): finite(value) for token, value in item.top} for item in logprobs],
            "text_offset": offsets,
            **extension,
        }


class ChatFormat(OpenAIFormat):
    """POST /v1/chat/completions. The role comes with the first content, so that no chunk comes before there is text."""

    prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self.logprobs(choice, choice.logprobs)}

    def delta(self, choice: Choice, update: GenerationUpdate) -> Json:
        role = {"role": "assistant"} if choice.num_chunks == 1 else {}
        return {"delta": role | {"content": update.text}, "logprobs": self.logprobs(choice, update.logprobs)}

    def logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if choice.request.sampling.logprobs is None:
            return None
        rows = [
            self.token_row(item.token, item.logprob)
            | {"top_logprobs": [self.token_row(token, value) for token, value in item.top]}
            for item in logprobs
        ]
        return {"content": rows, "refusal": None}

    def token_row(self, token: int, logprob: float) -> Json:
        """Return a token; its bytes are None where it is only a part of a character."""
        text = self.token_text(token)
        return {"token": text, "logprob": finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


class GenerateFormat(Format):
    """POST /generate: text and ids of every chunk are cumulative, as SGLang sends them; the prompt is not in them."""

    def row(self, choice: Choice) -> Json:
        meta = self.meta_info(choice)
        if choice.request.sampling.logprobs is not None:
            meta["output_token_logprobs"] = [[finite(item.logprob), item.token, None] for item in choice.logprobs]
            top = [[[finite(value), token, None] for token, value in item.top] for item in choice.logprobs]
            meta["output_top_logprobs"] = top
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def chunk(self, choice: Choice, update: GenerationUpdate) -> Json:
        return self.row(choice) | ({"index": choice.index} if self.call.is_batch else {})

    def last_chunk(self, choices: Sequence[Choice]) -> Json | None:
        return None

    def body(self, choices: Sequence[Choice]) -> Any:
        rows = [self.row(choice) for choice in choices]
        return rows if self.call.is_batch else rows[0]


FORMATS: Mapping[str, type[Format]] = {"completions": CompletionsFormat, "chat": ChatFormat, "generate": GenerateFormat}
