"""From a prompt to token ids. Knows a tokenizer only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgen.engine.special import Message, encode_data, encode_rendered, found_in
from kvgen.errors import InputError, ModelError, UsageError
from kvgen.models.failures import failing_as_model_error


def encode(
    tokenizer: Any,
    text: str,
    chat: bool = False,
    system: str | None = None,
    parse_special: bool = False,
) -> list[int]:
    """The ids that are forwarded for ``text``.

    Plain completion takes what the tokenizer adds by itself (often one begin-of-text id). With
    ``chat`` the model's own template wraps the text as a user's turn, after ``system`` if given,
    and nothing is added to what the template writes. Special tokens that the text spells out are
    text, unless ``parse_special``. Raises ``InputError`` for an empty prompt and ``UsageError``
    when there is no template.
    """
    check_text(text)
    if chat:
        ids = encode_chat(tokenizer, messages_for(text, system), parse_special)
    else:
        with failing_as_model_error("the model's tokenizer fails on the prompt"):
            if parse_special or not found_in(tokenizer, [text]):
                ids = tokenizer(text, verbose=False)["input_ids"]
            else:
                ids = encode_data(tokenizer, text)
    if not ids:
        raise InputError("the prompt holds no tokens for this model's tokenizer")
    return list(ids)


def check_text(text: str) -> None:
    """Raise ``InputError`` for a text that is empty or cannot be written as UTF-8."""
    if not text:
        raise InputError("the prompt is empty; give at least one character of text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt is not valid text: character {error.start} is half of a surrogate pair"
        ) from error


def messages_for(text: str, system: str | None = None) -> list[Message]:
    """A conversation's first question, after the system message if there is one."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], parse_special: bool = False
) -> list[int]:
    """The ids of a conversation in the model's own template, up to where the answer begins.

    Special tokens that the messages spell out are text, unless ``parse_special``. Raises
    ``UsageError`` when there is no template or it refuses the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "this model has no chat template; use a chat model, or generate without --chat"
        )

    def render(conversation: Sequence[Message]) -> str:
        try:
            rendered: str = tokenizer.apply_chat_template(
                list(conversation), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs of the model's author
            raise UsageError(
                f"the model's chat template refuses this conversation: {error}"
            ) from error
        return rendered

    with failing_as_model_error("the model's tokenizer fails on the conversation"):
        if not parse_special and found_in(tokenizer, [m["content"] for m in messages]):
            return encode_rendered(tokenizer, messages, render)
        # The template has written every special token itself, begin-of-text included.
        ids: list[int] = tokenizer(render(messages), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids


def check_known(ids: list[int], vocabulary: int) -> None:
    """Raise ``ModelError`` for an id that the model's table of ``vocabulary`` rows lacks."""
    if max(ids) >= vocabulary:
        raise ModelError(
            f"the tokenizer gives the id {max(ids)} and the model knows {vocabulary} tokens; "
            "they do not belong together"
        )


def check_fits(prompt_tokens: int, requested: int | None, limit: int | None) -> int | None:
    """How many new tokens fit, or ``None`` where the model states no limit.

    Raises ``InputError`` with the numbers when the prompt or what was ``requested`` is too long.
    """
    if limit is None:
        return None
    room = limit - prompt_tokens
    if room < 1:
        raise InputError(
            f"the prompt has {prompt_tokens:,} tokens and the model's context holds {limit:,}; "
            f"shorten the prompt to at most {limit - 1:,} tokens"
        )
    if requested is not None and requested > room:
        raise InputError(
            f"{prompt_tokens:,} prompt tokens and {requested:,} new ones do not fit the model's "
            f"context of {limit:,}; ask for at most {room:,} new tokens (-n {room})"
        )
    return room
