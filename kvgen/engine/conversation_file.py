"""A conversation in a cache file: what was said and the ids it was said in, with the cache.

The file is one of kvgen's cache files; what was said lies in its header.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgen.cache.disk import CacheFileError
from kvgen.cache.fingerprint import Fingerprint, fingerprint
from kvgen.cache.saving import load_cache, open_for, save_cache
from kvgen.engine.conversation import Conversation, Turn
from kvgen.errors import KvgenError

_KEY = "conversation"


class ConversationFiles:
    """Saves and loads the conversations of one model, which is identified once."""

    def __init__(self, talk: Conversation) -> None:
        """``talk`` is saved, and replaced by what is loaded."""
        self._talk = talk
        self._own: Fingerprint | None = None

    def save(self, path: Path) -> int:
        """Write the conversation and its cache; returns the file's bytes.

        Raises ``CacheFileError`` for a file that is there and is none of this model's, and
        ``KvgenError`` for one that cannot be written; it is then as it was.
        """
        talk, own = self._talk, self._fingerprint()
        if path.exists():
            open_for(path, own)
        said = {"system": talk.system, "turns": [_plain(turn) for turn in talk.turns]}
        name, extra = talk.loaded.source.name, {_KEY: said}
        try:
            return save_cache(path, talk.cache, talk.held, own, name, extra=extra)
        except OSError as error:
            raise KvgenError(f"cannot write {path}: {error.strerror}; nothing is saved") from error

    def load(self, path: Path) -> None:
        """Go on with the conversation in a file.

        Raises ``CacheFileError`` for a file of another model, naming what differs, for a damaged
        one, and for one without a conversation; the present one then goes on.
        """
        file = open_for(path, self._fingerprint())
        said = file.header.extra.get(_KEY)
        if said is None:
            raise CacheFileError(
                f"{path} holds a cache and no conversation; generate --prompt-cache can use it"
            )
        cache = self._talk.new_cache()
        load_cache(file, cache, self._talk.loaded.device)
        try:
            turns = [Turn(**turn) for turn in said["turns"]]
            self._talk.replace(said["system"], turns, cache, file.ids)
        except (KeyError, TypeError, ValueError) as error:
            raise CacheFileError(f"{path} holds a conversation that cannot be read") from error

    def _fingerprint(self) -> Fingerprint:
        if self._own is None:
            talk, loaded = self._talk, self._talk.loaded
            specs, policy = talk.cache.specs, talk.cache.policy
            attention = talk.forward.attention
            self._own = fingerprint(loaded.model, loaded.tokenizer, specs, policy, attention)
        return self._own


def _plain(turn: Turn) -> dict[str, Any]:
    return {"question": turn.question, "answer": turn.answer, "answer_ids": turn.answer_ids}
