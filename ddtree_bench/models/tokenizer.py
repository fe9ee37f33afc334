"""Text to tokens and back: a checkpoint's tokenizer.json, its end tokens and its chat template.

`Detokenizer` turns a growing list of tokens into text pieces and holds back bytes of an unfinished character.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

REPLACEMENT = "\ufffd"
LONG_TEXT = 65_536  # characters; about 30 ms of tokenizing


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, empty when there is no such file.

    Raises:
        ValueError: it holds something else; names the file.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must hold JSON; {error}; take it from the checkpoint's release again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; given {type(value).__name__}; take it from the release again")
    return value


def _read_fast(path: Path) -> FastTokenizer:
    read_json(path)  # `tokenizers` raises a bare Exception for a file that is no JSON
    return FastTokenizer.from_file(str(path))


def token_text(value: Any) -> str | None:
    """Return a special token's text from either form that tokenizer_config.json uses."""
    return value.get("content") if isinstance(value, dict) else value


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer.

    Args:
        fast: the byte-level tokenizer.
        eos_token_ids: ids that end a text.
        chat_template: Jinja source, or None.
        special_tokens: bos_token, eos_token, … as text, handed to the template.
    """

    fast: FastTokenizer
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and generation_config.json (or config.json) of a checkpoint.

        Raises:
            ValueError: tokenizer.json is missing, or a file is broken.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"a checkpoint folder must hold tokenizer.json; {folder} does not; pass another folder")
        fast = _read_fast(path)
        settings = read_json(folder / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: text for name in names if (text := token_text(settings.get(name))) is not None}
        eos = read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is None:
            eos = read_json(folder / "config.json").get("eos_token_id")
        if eos is None and "eos_token" in special:
            eos = fast.token_to_id(special["eos_token"])
        eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        template = settings.get("chat_template")
        template_file = folder / "chat_template.jinja"
        if template is None and template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        return cls(fast=fast, eos_token_ids=eos_ids, chat_template=template, special_tokens=special)

    @property
    def vocab_size(self) -> int:
        return self.fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return token ids; special tokens written in the text are recognised, none are added."""
        if len(text) < LONG_TEXT:
            return self.fast.encode(text, add_special_tokens=False).ids
        return self.fast.encode_batch([text], add_special_tokens=False)[0].ids  # lets other threads run meanwhile

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return text; bytes that are no character become U+FFFD."""
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """Return the id of one token by its text, None when unknown."""
        return self.fast.token_to_id(text)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh incremental detokenizer."""
        return Detokenizer(self, skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render messages ({"role", "content"}) with the checkpoint's template.

        Raises:
            ValueError: the checkpoint has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "a chat needs a checkpoint with chat_template in tokenizer_config.json; this one has none; "
                "use the completions endpoint instead"
            )
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = refuse_messages
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"messages must suit the checkpoint's chat template; it answered {error}; change the messages"
            ) from error


def refuse_messages(message: str) -> None:
    """What chat templates call raise_exception."""
    raise ValueError(f"messages must suit the checkpoint's chat template; it answered {message!r}; change them")


class Detokenizer:
    """Turns tokens into text as they come; the pieces joined are the text of all tokens.

    A token may end in the middle of a UTF-8 character: text is held back until the character is whole, and
    `flush` gives what is left at the end. Only a window of recent tokens is decoded at each step.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.ids: list[int] = []
        self.window_start = 0
        self.emitted_end = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is certain now, possibly empty."""
        self.ids.extend(ids)
        before = self.decode_span(self.window_start, self.emitted_end)
        after = self.decode_span(self.window_start, len(self.ids))
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self.window_start, self.emitted_end = self.emitted_end, len(self.ids)
        return after[len(before) :]

    def flush(self) -> str:
        """Return the held-back text; an unfinished character comes out as U+FFFD."""
        before = self.decode_span(self.window_start, self.emitted_end)
        after = self.decode_span(self.window_start, len(self.ids))
        self.window_start = self.emitted_end = len(self.ids)
        return after[len(before) :]

    def decode_span(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(self.ids[start:stop], self.skip_special_tokens)
