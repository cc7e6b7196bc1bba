"""A toy tokenizer with a chat template, for toys of any model type, and conversations on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from loaded import loaded_tiny

from kvgen.cache.reuse import Receipt
from kvgen.engine.conversation import ChatOptions, Conversation
from kvgen.engine.decoder import Decoder
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.models import LoadedModel

START, END, FIRST = 1, 2, 5
SPECIAL = {"<|im_start|>": START, "<|im_end|>": END}
LETTERS = "\n" + "".join(map(chr, range(32, 127)))
PAIRS = FIRST + len(LETTERS)
"""From here on an id is two letters that the tokenizer itself always writes as two ids."""

Template = Callable[[Sequence[dict[str, str]]], str]


def chatml(messages: Sequence[dict[str, str]]) -> str:
    """The template of SmolLM2 and many others."""
    turns = (f"<|im_start|>{m['role'][0]}\n{m['content']}<|im_end|>\n" for m in messages)
    return "".join(turns) + "<|im_start|>a\n"


def trimming(messages: Sequence[dict[str, str]]) -> str:
    """A template that shortens earlier answers to their first two characters."""
    short = [
        {**m, "content": m["content"][:2]} if m["role"] == "assistant" else m for m in messages
    ]
    return chatml(short)


def counting(messages: Sequence[dict[str, str]]) -> str:
    """A template whose very beginning changes with every turn."""
    return f"{len(messages)}\n" + chatml(messages)


class ChatLetters:
    """One id per character; the ids above stand for two, and only a model writes them."""

    all_special_ids = (START, END)
    eos_token_id = END

    def __init__(self, template: Template | None = chatml) -> None:
        self.chat_template = template

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        ids = []
        while text:
            name = next((name for name in SPECIAL if text.startswith(name)), text[0])
            ids.append(SPECIAL[name] if name in SPECIAL else FIRST + LETTERS.index(name))
            text = text[len(name) :]
        return {"input_ids": ids}

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        assert self.chat_template is not None
        return self.chat_template(messages)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        names = {number: name for name, number in SPECIAL.items()}
        plain = (number for number in ids if not (skip_special_tokens and number in names))
        return "".join(names.get(number) or self.text(number) for number in plain)

    def text(self, number: int) -> str:
        """Of one id that is not special."""
        if number < FIRST:
            return "?"
        if number < PAIRS:
            return LETTERS[number - FIRST]
        return "ab" if number % 2 else "cd"

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self.text(ids)


@cache
def _toy(model_type: str, limit: int | None) -> LoadedModel:
    return replace(loaded_tiny(model_type, limit), stop_ids=frozenset({END}))


def talk_of(
    model_type: str,
    template: Template | None = chatml,
    limit: int | None = 240,
    **options: Any,
) -> Conversation:
    """A conversation with a toy; answers have six tokens unless ``options`` say otherwise."""
    loaded = replace(_toy(model_type, limit), tokenizer=ChatLetters(template))  # type: ignore[arg-type]
    return Conversation(loaded, ChatOptions(**{"max_new_tokens": 6, **options}))


class Said(NamedTuple):
    """One finished turn."""

    ids: list[int]
    new_ids: list[int]
    text: str
    receipt: Receipt
    why: str | None


def say(talk: Conversation, question: str) -> Said:
    """One turn, to its end."""
    plan = talk.plan(question)
    reply = talk.reply(plan)
    for _ in reply.prefill():
        pass
    while reply.ending is None:
        reply.step()
    talk.keep(plan, reply)
    assert talk.cache.position == len(talk.held)
    return Said(plan.ids, reply.new_ids, reply.text, plan.receipt, plan.why_no_further)


def fresh(talk: Conversation, said: Said) -> list[int]:
    """What the model answers to the same ids without any cache."""
    torch.set_num_threads(1)
    decoder = Decoder(Forward(talk.loaded.model), said.ids, Sampler(SamplingOptions()), None)
    return [decoder.step().id for _ in said.new_ids]
