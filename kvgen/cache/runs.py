"""A run of slots that grows at its end and is cut at either end: what other layouts are built of.

Imports no torch itself; tensors make tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvgen.cache.state import State, parallel_state

if TYPE_CHECKING:
    from torch import Tensor


class Run:
    """Parallel buffers ``[batch, heads, capacity, dim]``, filled from ``begin`` to ``end``.

    Appending writes new slots only; a full buffer moves into a larger one, or to its own front
    where that frees enough.
    """

    def __init__(self, step: int = 256) -> None:
        """``step``: slots that buffers grow by, or an eighth of them where that is more."""
        self.step = step
        self._begin = self._end = 0
        self._buffers: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        """Slots filled."""
        return self._end - self._begin

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self._buffers[0].shape[2] if self._buffers else 0

    @property
    def views(self) -> tuple[Tensor, ...]:
        """What is filled, oldest first; empty before the first ``append``."""
        return tuple(buffer[:, :, self._begin : self._end] for buffer in self._buffers)

    @property
    def bytes_used(self) -> int:
        """Bytes of the filled slots."""
        return sum(view.nbytes for view in self.views)

    def buffers(self) -> Sequence[Tensor]:
        """The memory owned."""
        return self._buffers

    def append(self, *news: Tensor) -> None:
        """Add tensors ``[batch, heads, new, dim]`` at the end."""
        count = news[0].shape[2]
        if not self._buffers:
            self._buffers = tuple(n.new_empty((*n.shape[:2], 0, n.shape[3])) for n in news)
        if self._end + count > self.capacity:
            self._make_room(len(self) + count)
        for buffer, new in zip(self._buffers, news, strict=True):
            buffer[:, :, self._end : self._end + count] = new
        self._end += count

    def drop_first(self, count: int) -> None:
        """Forget the oldest ``count`` slots."""
        self._begin += count

    def give_back(self) -> None:
        """Shrink buffers that a long prompt has left far larger than what is in them."""
        if self.capacity > len(self) + 2 * self.step:
            self._move(-(-max(1, len(self)) // self.step) * self.step)

    def drop_last(self, count: int) -> None:
        """Forget the newest ``count`` slots."""
        self._end -= count

    def clear(self) -> None:
        """Forget all; buffers stay allocated."""
        self._begin = self._end = 0

    def copy(self) -> Run:
        """An independent run with the same content."""
        twin = Run(self.step)
        twin._end = len(self)
        twin._buffers = tuple(buffer[:, :, self._begin :].clone() for buffer in self._buffers)
        return twin

    def state(self) -> State:
        """What is filled."""
        return parallel_state(self.views)

    def load(self, state: State) -> None:
        """Take the place of the run that gave ``state``."""
        self._buffers = state.parallel()
        self._begin, self._end = 0, self.capacity

    def _make_room(self, needed: int) -> None:
        held, capacity = len(self), self.capacity
        # Moving to the front pays once half of the buffer has been dropped.
        if needed > capacity - capacity // 2 or needed > capacity:
            grown = max(needed, held + held // 8)
            capacity = -(-grown // self.step) * self.step
        self._move(capacity)

    def _move(self, capacity: int) -> None:
        """What is filled to the front of new buffers."""
        filled, held = slice(self._begin, self._end), len(self)
        moved = tuple(b.new_empty((*b.shape[:2], capacity, b.shape[3])) for b in self._buffers)
        for target, source in zip(moved, self._buffers, strict=True):
            target[:, :, :held] = source[:, :, filled]
        self._begin, self._end, self._buffers = 0, held, moved
