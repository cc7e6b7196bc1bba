"""Stored prefixes in memory: a trie over token ids, and a budget of bytes.

Knows the cache and token ids, nothing of models, tokenizers or files. Ids are compared one by one,
never only as a hash. What is stored never changes: a prefix goes in and comes out as a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvgen.cache.manager import KVCache
from kvgen.cache.reuse import ONE_TOKEN, Receipt, cannot_serve, common_prefix, take_up

Ids = tuple[int, ...]


@dataclass
class _Entry:
    ids: Ids
    cache: KVCache
    seconds: float | None


@dataclass
class _Node:
    """Ids that follow its parent's; ``entry`` if a stored prefix ends here."""

    edge: Ids = ()
    children: dict[int, _Node] = field(default_factory=dict)
    entry: _Entry | None = None

    def entries(self) -> Iterator[_Entry]:
        """All that are stored here and below."""
        if self.entry is not None:
            yield self.entry
        for child in self.children.values():
            yield from child.entries()


class PrefixIndex:
    """Caches by the tokens they hold; the one least recently used goes first."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        """``budget_bytes`` bounds what all stored caches allocate; ``None`` sets no bound."""
        self._budget = budget_bytes
        self._root = _Node()
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
        self._node(key).entry = entry
        self._by_age[key] = entry
        self.bytes_allocated += entry.cache.bytes_allocated
        while self._budget is not None and self.bytes_allocated > self._budget:
            self.drop(next(iter(self._by_age)))
        return key in self._by_age

    def take(self, prompt: Sequence[int]) -> tuple[KVCache | None, Receipt]:
        """A copy of what serves most of ``prompt``, ready to go on; ``None`` if nothing does."""
        path = self._path(tuple(prompt))
        matched = path[-1][1]
        refusal: str | None = None
        for node, depth in reversed(path[1:]):
            for entry in node.entries():
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
        """Forget the prefix ``ids``. Raises ``KeyError`` if it is not stored."""
        entry = self._by_age.pop(tuple(ids))
        self.bytes_allocated -= entry.cache.bytes_allocated
        path = self._path(entry.ids)
        path[-1][0].entry = None
        # Nodes that lead nowhere any more go with it.
        for (parent, _), (node, _) in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.entry is None and not node.children:
                del parent.children[node.edge[0]]

    def _path(self, ids: Ids) -> list[tuple[_Node, int]]:
        """Nodes from the root along ``ids``, each with how many of the ids it agrees with.

        The last one may agree with only a part of its edge.
        """
        node, depth = self._root, 0
        path = [(node, depth)]
        while child := node.children.get(ids[depth]) if depth < len(ids) else None:
            shared = common_prefix(child.edge, ids[depth : depth + len(child.edge)])
            node, depth = child, depth + shared
            path.append((node, depth))
            if shared < len(child.edge):
                break
        return path

    def _node(self, ids: Ids) -> _Node:
        """The node at which ``ids`` end, made if it is not there."""
        path = self._path(ids)
        node, depth = path[-1]
        if len(path) > 1:
            shared = depth - path[-2][1]
            if shared < len(node.edge):
                lower = _Node(node.edge[shared:], node.children, node.entry)
                node.edge, node.children, node.entry = node.edge[:shared], {}, None
                node.children[lower.edge[0]] = lower
        if depth < len(ids):
            node.children[ids[depth]] = node = _Node(ids[depth:])
        return node
