"""Stored prefixes in memory: a trie over token ids, and a budget of bytes.

Knows the cache and token ids, nothing of models, tokenizers or files. Ids are compared one by one,
never only as a hash. What is stored never changes: a prefix goes in and comes out as a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvgen.cache.manager import KVCache
from kvgen.cache.reuse import ONE_TOKEN, Receipt, cannot_serve, take_up
from kvgen.cache.trie import Ids, Trie


@dataclass
class _Entry:
    ids: Ids
    cache: KVCache
    seconds: float | None


class PrefixIndex:
    """Caches by the tokens they hold; the one least recently used goes first."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        """``budget_bytes`` bounds what all stored caches allocate; ``None`` sets no bound."""
        self._budget = budget_bytes
        self._trie: Trie[_Entry] = Trie()
        self._by_age: OrderedDict[Ids, _Entry] = OrderedDict()
        self.bytes_allocated = 0

    def __len__(self) -> int:
        """Prefixes stored."""
        return len(self._by_age)

    def add(self, ids: Sequence[int], cache: KVCache, seconds: float | None = None) -> bool:
        """Store a copy of ``cache``, which holds ``ids``; ``seconds`` is what forwarding them took.

        Evicts what was not used for longest. False, and nothing stored, for a cache that is larger
        than the whole budget.
        """
        key = tuple(ids)
        if cache.position != len(key):
            raise ValueError(f"the cache holds {cache.position} tokens, not {len(key)}")
        if key in self._by_age:
            self._by_age.move_to_end(key)
            return True
        if self._budget is not None and cache.bytes_used > self._budget:
            return False
        entry = _Entry(key, cache.fork(), seconds)
        allocated = entry.cache.bytes_allocated
        if self._budget is not None and allocated > self._budget:
            return False
        self._trie.node(key).value = entry
        self._by_age[key] = entry
        self.bytes_allocated += allocated
        while self._budget is not None and self.bytes_allocated > self._budget:
            self.drop(next(iter(self._by_age)))
        return True

    def take(self, prompt: Sequence[int]) -> tuple[KVCache | None, Receipt]:
        """A copy of what serves most of ``prompt``, ready to go on; ``None`` if nothing does."""
        path = self._trie.path(tuple(prompt))
        matched = path[-1][1]
        refusal: str | None = None
        for node, depth in reversed(path[1:]):
            for entry in node.values():
                reused = min(depth, len(prompt) - 1)
                why = cannot_serve(entry.cache, reused) if reused else ONE_TOKEN
                if why is None:
                    self._by_age.move_to_end(entry.ids)
                    cache = entry.cache.fork()
                    receipt = take_up(cache, entry.ids, prompt, entry.seconds)
                    why = refusal or receipt.why_fewer
                    return cache, replace(receipt, matched=matched, why_fewer=why)
                refusal = refusal or why
        return None, Receipt(len(prompt), matched, 0, refusal)

    def drop(self, ids: Sequence[int]) -> None:
        """Forget the prefix ``ids``, if it is stored."""
        entry = self._by_age.pop(tuple(ids), None)
        if entry is None:
            return
        self.bytes_allocated -= entry.cache.bytes_allocated
        self._trie.drop(entry.ids)
