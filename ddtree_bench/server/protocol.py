"""Bodies of /v1/completions, /v1/chat/completions and /generate, read and checked into engine requests.

Every field that changes what is generated is either obeyed or refused with a 400 that says so. A field that is in neither
list is ignored, as inference servers do, so that clients made for them work; the answer names it in `meta_info.ignored_fields`.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ddtree_bench.engine.request import GenerationRequest, SamplingParams
from ddtree_bench.server.errors import ApiError
from ddtree_bench.server.fields import Fields, is_token_list, show

MAX_PROMPTS = 256
MAX_SEED = 2**63 - 1
OPENAI_MAX_TOKENS = 16
SGLANG_MAX_TOKENS = 128

REFUSED_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structured_outputs": (),
    "structural_tag": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "stop_regex": ([],),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "token_ids_logprob": ([],),
    "truncate_prompt_tokens": (),
    "lora_path": ("",),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
}
REFUSED_SAMPLING_PARAMS = REFUSED_ANYWHERE | {"max_tokens": (), "max_completion_tokens": ()}  # here it is max_new_tokens
REFUSED_OPENAI = REFUSED_ANYWHERE | {
    "max_new_tokens": (),
    "suffix": ("",),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
}
REFUSED_CHAT = REFUSED_OPENAI | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
REFUSED_GENERATE = REFUSED_ANYWHERE | {
    "input_embeds": (),
    "image_data": ([], ""),
    "video_data": ([], ""),
    "audio_data": ([], ""),
    "logprob_start_len": (-1,),
    "session_params": ({},),
}
BELONG_IN_SAMPLING_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "sampling_seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "max_new_tokens"),
)


class TokenizerLike(Protocol):
    """What the server needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model as clients see it.

    `model_id` is its name, `aliases` are other names it answers to; without a tokenizer it takes and gives token ids alone.
    """

    model_id: str
    model_path: str
    tokenizer: TokenizerLike | None
    max_context: int
    vocab_size: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP call: its engine requests, one a prompt, and how to answer. `is_batch`: /generate got a list of prompts."""

    rid: str
    requests: tuple[GenerationRequest, ...]
    is_stream: bool
    is_batch: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ignored_fields: tuple[str, ...] = ()


def parse_completions(body: Any, model: ServedModel) -> Call:
    """Read the body of POST /v1/completions."""
    fields = Fields(body)
    fields.refuse(REFUSED_OPENAI | {"top_logprobs": (0,)})
    check_model(fields, model)
    prompts, _ = read_prompts(fields, "prompt", fields.take("prompt"), model)
    max_tokens = fields.integer("max_tokens", minimum=1)
    logprobs = fields.integer("logprobs", minimum=0)
    return make_call(fields, model, prompts, max_tokens, OPENAI_MAX_TOKENS, logprobs)


def parse_chat(body: Any, model: ServedModel) -> Call:
    """Read the body of POST /v1/chat/completions."""
    fields = Fields(body)
    fields.refuse(REFUSED_CHAT)
    check_model(fields, model)
    messages = read_messages(fields)
    if model.tokenizer is None:
        raise ApiError(f"a chat needs a tokenizer; the model {model.model_id} has none; use /v1/completions", param="messages")
    try:
        text = model.tokenizer.apply_chat_template(messages)
    except ValueError as error:
        raise ApiError(str(error), param="messages") from error
    prompt = check_prompt("messages", encode("messages", text, model), model)
    old, new = fields.integer("max_tokens", minimum=1), fields.integer("max_completion_tokens", minimum=1)
    if old is not None and new is not None and old != new:
        raise fields.error("max_tokens", f"max_completion_tokens {new} where both are given", old, "give one of them")
    is_wanted, num_top = fields.boolean("logprobs"), fields.integer("top_logprobs", minimum=0)
    if num_top and not is_wanted:
        raise fields.error("top_logprobs", "left out or 0 unless logprobs is true", num_top)
    max_tokens = old if new is None else new
    return make_call(fields, model, [prompt], max_tokens, model.max_context, (num_top or 0) if is_wanted else None)


def parse_generate(body: Any, model: ServedModel) -> Call:
    """Read the body of POST /generate, SGLang's own endpoint: text or input_ids, sampling_params, stream."""
    fields = Fields(body)
    fields.refuse(REFUSED_GENERATE)
    misplaced = next((name for name in BELONG_IN_SAMPLING_PARAMS if fields.take(name) is not None), None)
    if misplaced is not None:
        raise fields.error(misplaced, "inside sampling_params on this endpoint", fields.take(misplaced))
    text, input_ids = fields.take("text"), fields.take("input_ids")
    if (text is None) == (input_ids is None):
        raise fields.error("text", "given, or else input_ids, and not both", text)
    name, value = ("text", text) if input_ids is None else ("input_ids", input_ids)
    prompts, is_batch = read_prompts(fields, name, value, model)
    params = Fields({} if fields.take("sampling_params") is None else fields.take("sampling_params"), "sampling_params")
    params.refuse(REFUSED_SAMPLING_PARAMS)
    num_top = fields.integer("top_logprobs_num", default=0, minimum=0)
    logprobs = num_top if fields.boolean("return_logprob") else None
    sampling = read_sampling(params, model, params.integer("max_new_tokens", minimum=1), SGLANG_MAX_TOKENS, logprobs)
    rid = fields.text("rid") or uuid.uuid4().hex
    is_stream = fields.boolean("stream")
    ignored = fields.unread() + tuple(f"sampling_params.{name}" for name in params.unread())
    requests = make_requests(rid, prompts, sampling, model, "sampling_params.max_new_tokens")
    return Call(rid=rid, requests=requests, is_stream=is_stream, is_batch=is_batch, ignored_fields=ignored)


def check_model(fields: Fields, model: ServedModel) -> None:
    """Answer 404 to a request for another model than the one served."""
    name = fields.take("model")
    if name is not None and name not in (model.model_id, model.model_path, "default", *model.aliases):
        raise ApiError(
            f"model must be {model.model_id!r}, the one served here; given {show(name)}; see /v1/models",
            param="model",
            status=404,
            code="model_not_found",
        )


def read_prompts(fields: Fields, name: str, value: Any, model: ServedModel) -> tuple[list[list[int]], bool]:
    """Return the prompts as tokens, and whether a list of prompts was given (a list of integers is one prompt)."""
    is_batch = isinstance(value, list) and not is_token_list(value)
    prompts = value if is_batch else [value]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise fields.error(name, f"at most {MAX_PROMPTS} prompts", f"{len(prompts)} prompts", "send several requests")
    tokens = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens.append(check_prompt(name, encode(name, prompt, model), model))
        elif is_token_list(prompt):
            tokens.append(check_prompt(name, prompt, model))
        else:
            raise fields.error(name, "a string, a list of token ids, or a list of those", value)
    return tokens, is_batch


def encode(name: str, text: str, model: ServedModel) -> list[int]:
    """Return a text's tokens; half of a surrogate pair is no text."""
    if model.tokenizer is None:
        raise ApiError(f"{name} must be token ids: the model {model.model_id} has no tokenizer.json", param=name)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(f"{name} must be text; given half a surrogate pair at character {error.start}", param=name) from error
    return model.tokenizer.encode(text)


def check_prompt(name: str, tokens: list[int], model: ServedModel) -> list[int]:
    """Return the tokens of a prompt that is not empty, is in the vocabulary and leaves room in the context."""
    if not tokens:
        raise ApiError(f"{name} must hold at least one token; given none", param=name)
    bad = next((token for token in tokens if not 0 <= token < model.vocab_size), None)
    if bad is not None:
        raise ApiError(f"{name} must hold token ids from 0 to {model.vocab_size - 1}; given {bad}", param=name)
    if len(tokens) >= model.max_context:
        raise context_error(name, len(tokens), 1, model)
    return tokens


def context_error(name: str, num_prompt: int, max_tokens: int, model: ServedModel) -> ApiError:
    """Return the error for a request that does not fit the model's context."""
    return ApiError(
        f"the prompt and the answer must fit the context of {model.max_context} tokens; given {num_prompt} prompt tokens and "
        f"{max_tokens} to generate, {num_prompt + max_tokens} together; shorten the prompt or ask for fewer",
        param=name,
        code="context_length_exceeded",
    )


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return chat messages with their content as plain text."""
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.error("messages", "a list of at least one message", messages)
    return [read_message(Fields(message, f"messages[{index}]")) for index, message in enumerate(messages)]


def read_message(fields: Fields) -> dict[str, Any]:
    role, content = fields.text("role"), fields.take("content")
    if role is None:
        raise fields.error("role", "a string", None)
    for name in ("tool_calls", "function_call", "audio"):
        if fields.take(name):
            raise fields.error(name, "left out (tools are not supported)", fields.take(name))
    if isinstance(content, list):
        parts = [Fields(part, f"{fields.where}.content[{index}]") for index, part in enumerate(content)]
        content = "".join(read_text_part(part) for part in parts)
    if not isinstance(content, str):
        raise fields.error("content", "a string or a list of text parts", content)
    return {"role": role, "content": content}


def read_text_part(part: Fields) -> str:
    if part.take("type") != "text":
        raise part.error("type", "'text' (the model reads text only)", part.take("type"))
    text = part.take("text")
    if not isinstance(text, str):
        raise part.error("text", "a string", text)
    return text


def make_call(
    fields: Fields,
    model: ServedModel,
    prompts: list[list[int]],
    max_tokens: int | None,
    default_max_tokens: int,
    logprobs: int | None,
) -> Call:
    """Read what both OpenAI endpoints share and return the call."""
    sampling = read_sampling(fields, model, max_tokens, default_max_tokens, logprobs)
    options = Fields({} if fields.take("stream_options") is None else fields.take("stream_options"), "stream_options")
    is_stream = fields.boolean("stream")
    if not is_stream and fields.take("stream_options"):
        raise fields.error("stream_options", "left out unless stream is true", fields.take("stream_options"))
    continuous = options.boolean("continuous_usage_stats")
    include_usage = options.boolean("include_usage")
    rid = fields.text("rid") or uuid.uuid4().hex
    return Call(
        rid=rid,
        requests=make_requests(rid, prompts, sampling, model, "max_tokens"),
        is_stream=is_stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        ignored_fields=fields.unread(),
    )


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters before the prompt is known: `params` has max_tokens as asked, or the default to be cut."""

    params: SamplingParams
    is_max_tokens_given: bool
    is_seed_given: bool


def read_sampling(
    fields: Fields, model: ServedModel, max_tokens: int | None, default_max_tokens: int, logprobs: int | None
) -> Sampling:
    """Read the sampling fields; temperature 1 is the default of both OpenAI and SGLang."""
    top_k = fields.integer("top_k", default=0, minimum=-1)
    seed = fields.integer("seed")
    seed = fields.integer("sampling_seed") if seed is None else seed
    fields.read.add("sampling_seed")
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise fields.error("seed", f"between 0 and {MAX_SEED}", seed)
    stop = fields.texts("stop")
    for text in stop:
        encode("stop", text, model)
    stop_token_ids = fields.integers("stop_token_ids")
    if any(not 0 <= token < model.vocab_size for token in stop_token_ids):
        raise fields.error("stop_token_ids", f"token ids from 0 to {model.vocab_size - 1}", list(stop_token_ids))
    try:
        params = SamplingParams(
            temperature=fields.number("temperature", 1.0),
            top_k=max(top_k or 0, 0),
            top_p=fields.number("top_p", 1.0),
            min_p=fields.number("min_p", 0.0),
            repetition_penalty=fields.number("repetition_penalty", 1.0),
            presence_penalty=fields.number("presence_penalty", 0.0),
            frequency_penalty=fields.number("frequency_penalty", 0.0),
            seed=seed or 0,
            max_tokens=max_tokens or default_max_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=fields.boolean("ignore_eos"),
            logprobs=logprobs,
        )
    except ValueError as error:
        raise ApiError(str(error), param=str(error).split(" ", 1)[0]) from error
    return Sampling(params, max_tokens is not None, seed is not None)


def make_requests(
    rid: str, prompts: list[list[int]], sampling: Sampling, model: ServedModel, max_tokens_name: str
) -> tuple[GenerationRequest, ...]:
    """Return one engine request a prompt; a max_tokens that was asked for must fit, a default is cut to the room there is."""
    requests = []
    for index, prompt in enumerate(prompts):
        room = model.max_context - len(prompt)
        wanted = sampling.params.max_tokens
        if sampling.is_max_tokens_given and wanted > room:
            raise context_error(max_tokens_name, len(prompt), wanted, model)
        seed = sampling.params.seed if sampling.is_seed_given else secrets.randbelow(2**32)
        request_id = rid if len(prompts) == 1 else f"{rid}-{index}"
        params = replace(sampling.params, max_tokens=min(wanted, room), seed=seed)
        requests.append(GenerationRequest(request_id=request_id, prompt_tokens=tuple(prompt), sampling=params))
    return tuple(requests)
