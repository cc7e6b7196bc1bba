"""From token ids to text, piece by piece: never half a character, never a stop string.

Knows two verbs of a tokenizer only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Ids of the prompt that give the first new token its context (leading spaces, joined bytes).
_CONTEXT = 6
# SentencePiece's tokens for single bytes. A run of them is decoded as one: if any byte of it does
# not fit, none does, so what a run says is known only when it has ended.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """What this module needs of a tokenizer."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of ``ids``."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's entry for one id."""


class IncrementalText:
    """The text of a growing list of ids, handed out in pieces that join to the whole.

    Each new id is decoded together with the few before it, because tokenizers decode by context.
    A piece that ends inside a character is held back until the character is complete or
    ``flush`` is called.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        """``prompt_ids`` give context; their text is not part of the pieces."""
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-_CONTEXT:])
        self._pending: list[int] = []
        self._in_bytes = False

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is unfinished."""
        self._pending.append(token_id)
        if _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or ""):
            self._in_bytes = True
        elif self._decode([token_id]):  # special tokens have no text and do not end a run
            self._in_bytes = False
        if self._in_bytes:
            return ""
        text = self._new_text()
        return "" if text.endswith(UNFINISHED) else self._release(text)

    def flush(self) -> str:
        """What was held back, as the tokenizer shows it."""
        return self._release(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        before = self._decode(self._context)
        both = self._decode(self._context + self._pending)
        return both[len(before) :]

    def _release(self, text: str) -> str:
        # Ids without text of their own (special tokens, a lone space mark) give too little context.
        self._context = self._pending if text else (self._context + self._pending)[-_CONTEXT:]
        self._pending = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class StopStrings:
    """Finds stop strings in text that arrives in pieces, and holds back what may begin one."""

    def __init__(self, stops: Iterable[str]) -> None:
        """None may be empty."""
        self._stops = list(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is safe to show. Once a stop string is complete, ``found`` names it and
        the text before its first occurrence is the last that is returned.
        """
        text = self._held + piece
        hits = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if hits:
            at, self.found = min(hits)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
