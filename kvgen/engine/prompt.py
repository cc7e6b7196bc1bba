"""From a prompt to token ids. Knows a tokenizer only."""

from __future__ import annotations

from typing import Any

from kvgen.errors import InputError, ModelError, UsageError
from kvgen.models.failures import failing_as_model_error


def encode(tokenizer: Any, text: str, chat: bool = False, system: str | None = None) -> list[int]:
    """The ids that are forwarded for ``text``.

    Plain completion takes what the tokenizer adds by itself (often one begin-of-text id). With
    ``chat`` the model's own template wraps the text as a user's turn, after ``system`` if given,
    and nothing is added to what the template writes. Raises ``InputError`` for an empty prompt
    and ``UsageError`` when there is no template.
    """
    if not text:
        raise InputError("the prompt is empty; give at least one character of text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt is not valid text: character {error.start} is half of a surrogate pair"
        ) from error
    with failing_as_model_error("the model's tokenizer fails on the prompt"):
        if chat:
            ids = _encode_chat(tokenizer, text, system)
        else:
            ids = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise InputError("the prompt holds no tokens for this model's tokenizer")
    return list(ids)


def _encode_chat(tokenizer: Any, text: str, system: str | None) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model has no chat template; leave out --chat, or use a chat model")
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # templates are programs of the model's author
        raise UsageError(f"the model's chat template refuses this conversation: {error}") from error
    # The template has written every special token itself, begin-of-text included.
    ids: list[int] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
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
