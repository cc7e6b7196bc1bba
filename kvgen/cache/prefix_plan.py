"""Where prompts that are all known in advance part from one another, so that no token that two of
them begin with is forwarded twice. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.cache.trie import Trie


@dataclass(frozen=True)
class Turn:
    """What to do about one prompt, in tokens from its beginning.

    It sets in at ``start``, which no later prompt needs once it is ``finished_with``. Later ones
    will set in at ``stops``, in ascending order.
    """

    start: int
    finished_with: bool
    stops: list[int]


class PrefixPlan:
    """The points at which prompts, taken in their order, leave the tokens that earlier ones have.

    Of each prompt at least the last token is forwarded. If every point is kept until its last use,
    no order can do with fewer tokens: each distinct prefix once, and one token more for each prompt
    that an earlier one contains whole.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        """``prompts`` are token ids, none empty."""
        # How many prompts that are still to come set in at a point.
        self._users: Trie[int] = Trie()
        self._starts: list[int] = []
        self._next = 0
        for prompt in prompts:
            ids = tuple(prompt)
            start = min(self._users.path(ids)[-1][1], len(ids) - 1)
            self._users.node(ids)
            if start:
                point = self._users.node(ids[:start])
                point.value = (point.value or 0) + 1
            self._starts.append(start)

    def next(self, prompt: Sequence[int]) -> Turn:
        """The turn of ``prompt``, asked for in the order in which they were given."""
        ids, start = tuple(prompt), self._starts[self._next]
        self._next += 1
        left = 1
        if start:
            point = self._users.node(ids[:start])
            point.value = left = (point.value or 0) - 1
        stops = [depth for node, depth in self._users.path(ids)[1:] if node.value]
        return Turn(start, left == 0, stops)
