"""Prefill and decode: one loop for the cached and the uncached path.

A step forwards whatever the cache does not hold yet and chooses one more token. On an empty cache
that is the whole prompt (prefill); later it is the newest token alone (decode); without a cache it
is always everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.engine.finite import NotFiniteError
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler
from kvgen.models.ranks import agreed


class Token(NamedTuple):
    """A chosen token and the logits ``[vocab]`` it was chosen from."""

    id: int
    logits: Tensor


class Decoder:
    """The ids of one sequence, grown by one at each ``step``."""

    def __init__(
        self,
        forward: Forward,
        prompt_ids: list[int],
        sampler: Sampler,
        cache: KVCache | None,
        prefill_chunk: int | None = None,
        keep_snapshot: bool = False,
    ) -> None:
        """``cache`` is empty or holds a beginning of ``prompt_ids``; ``None`` runs without one.

        ``prefill_chunk`` bounds the tokens of one forward. With ``keep_snapshot`` the first step
        forwards the last token by itself, and ``snapshot`` is the cache as it was before.
        """
        self.snapshot: KVCache | None = None
        self._snapshot_is_due = keep_snapshot
        self.ids = list(prompt_ids)
        self._prompt_tokens = len(prompt_ids)
        self.cache = cache
        self._forward = forward
        self._sampler = sampler
        self._chunk = prefill_chunk
        self._adapter = None if cache is None else TransformersCache(cache)

    def prefill(self) -> Iterator[int]:
        """Forward what is pending piece by piece, all but the last one, which ``step`` takes.

        Yields the tokens still pending after each, so that whoever asks can stop between them.
        """
        if self.cache is None or self._adapter is None or self._chunk is None:
            return
        while (pending := len(self.ids) - self.cache.position) > self._chunk:
            begin = self.cache.position
            piece = self.ids[begin : begin + self._chunk]
            self._forward.extend(piece, self._adapter)
            yield pending - self._chunk

    def ready(self) -> None:
        """Whatever the next step would do first and is no part of it, such as compiling."""
        if self._adapter is not None:
            self._forward.ready(self._adapter)

    def step(self) -> Token:
        """Forward what is pending and append one token.

        Raises ``ModelError`` naming step and layer when the logits are no finite numbers.
        """
        logits = self._logits()
        try:
            chosen = self._sampler.choose(logits, self.ids)
        except NotFiniteError as error:
            step = len(self.ids) - self._prompt_tokens
            raise self._forward.not_finite(self.ids, step) from error
        token = Token(agreed(chosen), logits)
        self.ids.append(token.id)
        return token

    def _logits(self) -> Tensor:
        if self.cache is None or self._adapter is None:
            return self._forward.uncached(self.ids)
        if self._snapshot_is_due:
            self._snapshot_is_due = False
            before_last = self.ids[self.cache.position : -1]
            if before_last:
                self._forward.extend(before_last, self._adapter, self._chunk)
            self.snapshot = self.cache.fork()
        pending = self.ids[self.cache.position :]
        return self._forward.extend(pending, self._adapter, self._chunk)
