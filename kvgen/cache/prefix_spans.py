"""Stored prefixes of caches that can go back: each token of a common beginning is kept once.

Takes the place of ``PrefixIndex`` where every slot of every layer stays as it was written. A prefix
is then only what lies between the next shorter one on its path and its own end. Knows the cache and
token ids, nothing of models.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvgen.cache.manager import KVCache
from kvgen.cache.reuse import ONE_TOKEN, Receipt
from kvgen.cache.rows import lay, lift
from kvgen.cache.trie import Ids, Trie


@dataclass
class _Span:
    """The pairs of the tokens from ``first`` to the end of ``ids``; ``wanted`` for itself, or only
    by those that continue it.
    """

    ids: Ids
    first: int
    pairs: list[list[Tensor]]
    seconds: float
    wanted: bool = True

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for part in self.pairs for tensor in part)


class PrefixSpans:
    """As ``PrefixIndex``: the one least recently used goes first, and what continues it before."""

    def __init__(self, empty: KVCache, budget_bytes: int | None = None) -> None:
        """``empty`` is a cache as those to come; ``budget_bytes`` bounds what is stored."""
        self._empty, self._budget = empty, budget_bytes
        self._trie: Trie[_Span] = Trie()
        self._by_age: OrderedDict[Ids, _Span] = OrderedDict()
        self.bytes_allocated = 0

    def __len__(self) -> int:
        """Prefixes stored for themselves."""
        return sum(span.wanted for span in self._by_age.values())

    def add(self, ids: Sequence[int], cache: KVCache, seconds: float = 0.0) -> None:
        """Store what ``cache`` holds of ``ids``; ``seconds`` is what forwarding them took."""
        key = tuple(ids)
        before = self._along(key)
        if before and before[-1].ids == key:
            before[-1].wanted = True
        else:
            first = len(before[-1].ids) if before else 0
            span = _Span(key, first, lift(cache, first, len(key)), seconds)
            self._trie.node(key).value = self._by_age[key] = span
            self.bytes_allocated += span.bytes
        self._touch(before)
        while self._budget is not None and self.bytes_allocated > self._budget:
            self._remove(next(iter(self._by_age.values())))

    def take(self, prompt: Sequence[int]) -> tuple[KVCache | None, Receipt]:
        """A cache with what serves most of ``prompt``; ``None`` if nothing does."""
        spans = self._along(tuple(prompt))
        matched = len(spans[-1].ids) if spans else 0
        reused = min(matched, len(prompt) - 1)
        if not reused:
            return None, Receipt(len(prompt), matched, 0, ONE_TOKEN if matched else None)
        cache = self._empty.fork()
        for span in spans:
            have = cache.position
            lay(cache, span.pairs, have - span.first, min(len(span.ids), reused) - span.first)
        self._touch(spans)
        why = ONE_TOKEN if reused < matched else None
        saved = spans[-1].seconds * reused / matched
        return cache, Receipt(len(prompt), matched, reused, why, saved)

    def drop(self, ids: Sequence[int]) -> None:
        """Forget the prefix ``ids``, if it is stored, as soon as nothing continues it."""
        span = self._by_age.get(tuple(ids))
        if span is None:
            return
        span.wanted = False
        for one in reversed(self._along(span.ids)):
            if one.wanted or any(other is not one for other in self._below(one)):
                break
            self._remove(one)

    def _along(self, ids: Ids) -> list[_Span]:
        """The stored prefixes of ``ids``, shortest first."""
        path = self._trie.path(ids)
        return [n.value for n, depth in path if n.value and len(n.value.ids) == depth]

    def _below(self, span: _Span) -> list[_Span]:
        return list(self._trie.node(span.ids).values())

    def _remove(self, span: _Span) -> None:
        del self._by_age[span.ids]
        self.bytes_allocated -= span.bytes
        self._trie.drop(span.ids)

    def _touch(self, spans: list[_Span]) -> None:
        """The shortest last, so that none goes before one that continues it."""
        for span in reversed(spans):
            if span.ids in self._by_age:
                self._by_age.move_to_end(span.ids)
