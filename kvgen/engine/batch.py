"""Several sequences decoded together: one forward gives each of them its next token.

Knows the cache and forwards; who measures or prints is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.cache.rows import drop_first, keep, put, stack
from kvgen.engine.finite import NotFiniteError
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler

# Common padding is cut off once it is this many slots, and this part of all.
_LEAST_CUT, _CUT_PART = 32, 8


@dataclass(eq=False)
class Row:
    """One sequence: its ids so far, and how its tokens are chosen."""

    ids: list[int]
    sampler: Sampler

    def choose(self, logits: Tensor) -> int:
        """Append the token chosen from ``logits [vocab]``; its id."""
        token = self.sampler.choose(logits, self.ids)
        self.ids.append(token)
        return token


class RowBatch:
    """Rows that come and go between steps.

    All end at the same slot of one cache, the shorter ones padded on their left. The place of a row
    that leaves is taken by the next that joins, which copies that one row alone, unless it is
    longer than all others. A batch of one row takes its cache over as it is.
    """

    def __init__(self, forward: Forward, size: int) -> None:
        """Places for ``size`` rows are made as soon as there are two."""
        self._forward = forward
        self._size = size
        self._cache: TransformersCache | None = None
        self._places: list[Row | None] = []
        self._padding: list[int] = []

    @property
    def rows(self) -> list[Row]:
        """Those in the batch, in the order of their places."""
        return [row for row in self._places if row is not None]

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the shared cache's buffers."""
        return self._cache.kv.bytes_allocated if self._cache else 0

    def join(self, row: Row, cache: KVCache) -> None:
        """Add a row; ``cache`` holds all of its ids but the last, and is the batch's from now on.

        With others in the batch, the cache must be one that ``why_alone`` has nothing against.
        """
        whole = self._cache.kv if self._cache and self.rows else None
        if whole is None:
            self._start(cache, [row], [0])
        elif None in self._places and cache.position <= whole.position:
            place = self._places.index(None)
            put(whole, place, cache)
            self._places[place] = row
            self._padding[place] = whole.position - cache.position
        else:
            self._close_ranks()
            size = max(self._size, len(self._places) + 1)
            wider = stack([whole, cache], size)
            padding = [p + wider.position - whole.position for p in self._padding]
            padding.append(wider.position - cache.position)
            free = size - len(padding)
            self._start(wider, [*self._places, row, *[None] * free], [*padding, *[0] * free])

    def leave(self, row: Row) -> None:
        """Take a row out; its place is free."""
        self._places[self._places.index(row)] = None

    def step(self) -> list[int]:
        """One more token for each row; their ids in the order of ``rows``."""
        self._close_ranks()
        self._cut_padding()
        assert self._cache is not None
        rows = self.rows
        newest = [row.ids[-1:] for row in rows]
        logits = self._forward.rows(newest, self._padding, self._cache)[:, -1]
        return [self.choose(row, each) for row, each in zip(rows, logits, strict=True)]

    def choose(self, row: Row, logits: Tensor) -> int:
        """Append the token chosen from ``logits [vocab]`` to a row; its id.

        Raises ``ModelError`` naming the layer when they are no finite numbers.
        """
        try:
            return row.choose(logits)
        except NotFiniteError as error:
            raise self._forward.not_finite(row.ids, None) from error

    def _start(self, cache: KVCache, rows: list[Row | None], padding: list[int]) -> None:
        self._cache = TransformersCache(cache)
        self._places, self._padding = rows, padding

    def _close_ranks(self) -> None:
        """Give up the places that are free."""
        if None not in self._places:
            return
        assert self._cache is not None
        taken = [place for place, row in enumerate(self._places) if row is not None]
        keep(self._cache.kv, taken)
        self._places = [self._places[place] for place in taken]
        self._padding = [self._padding[place] for place in taken]

    def _cut_padding(self) -> None:
        """Drop slots that are padding in every row, seldom enough that moving others pays."""
        assert self._cache is not None
        spare = min(self._padding)
        if spare >= max(_LEAST_CUT, self._cache.kv.position // _CUT_PART):
            drop_first(self._cache.kv, spare)
            self._padding = [padding - spare for padding in self._padding]
