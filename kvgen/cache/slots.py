"""Buffers with one slot per token: keys and values, or whatever else a layer keeps per token.

Knows torch's tensors, and imports torch only once there are some; knows nothing of transformers,
models or layer kinds. Slots always lie in order of absolute position, so any mask, bias or padding
a model applies by position stays right. Two numbers are kept apart: ``length`` counts every token
seen (absolute), ``_start`` is the slot of the oldest token still held (physical).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvgen.cache.state import State, parallel_state

if TYPE_CHECKING:
    from torch import Tensor


class TokenSlots:
    """Parallel buffers ``[batch, heads, capacity, dim]``, one slot in each per token.

    Without a window every token stays; with a window of W, W - 1 stay between updates. Appending
    writes the new slots only. Older ones are copied in two amortised cases: full buffers move into
    larger ones, and a window that reaches the end of its slack moves what it still needs to the
    front.
    """

    def __init__(
        self, window: int | None = None, step: int = 256, reserve: int = 0, block: int = 1
    ) -> None:
        """``step`` is the number of slots the buffers grow by, and a window's slack; ``reserve``
        the slots that they have from the first token on. Whoever reads ``block`` slots at a time
        may read on to the end of the last; ``step`` is a multiple of it.
        """
        self.window = window
        self.step = step
        self.reserve = reserve
        self.block = block
        self.length = 0
        self._start = 0
        self._limit = None if window is None else -(-(window - 1 + step) // block) * block
        self._buffers: tuple[Tensor, ...] = ()

    @property
    def held(self) -> int:
        """Tokens a later update can still return."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    @property
    def capacity(self) -> int:
        """Slots allocated per sequence."""
        return self._buffers[0].shape[2] if self._buffers else 0

    @property
    def views(self) -> tuple[Tensor, ...]:
        """What is held, ``[batch, heads, held, dim]`` each, oldest first; empty before any."""
        held = slice(self._start, self._start + self.held)
        return tuple(buffer[:, :, held] for buffer in self._buffers)

    @property
    def bytes_used(self) -> int:
        """Bytes of what is held, counted on the tensors themselves."""
        return sum(view.nbytes for view in self.views)

    def buffers(self) -> Sequence[Tensor]:
        """The memory owned, whole."""
        return self._buffers

    def sizes(self, new: int) -> tuple[int, int]:
        """Tokens that ``update`` with ``new`` ones returns, and the first's absolute position."""
        return self.held + new, self.length - self.held

    def update(self, *news: Tensor) -> tuple[Tensor, ...]:
        """Store tensors ``[batch, heads, new, dim]``; return those held before, then these.

        The results may be views into the buffers, valid until the next call.
        """
        held, new = self.held, news[0].shape[2]
        self.length += new
        if not self._buffers:
            self._buffers = tuple(n.new_empty((*n.shape[:2], 0, n.shape[3])) for n in news)
        if self._limit is not None and held + new > self._limit - self.step // 2:
            return self._pass_through(news, held)
        begin, end = self._place(held, new)
        for buffer, tensor in zip(self._buffers, news, strict=True):
            buffer[:, :, end - new : end] = tensor
        return tuple(buffer[:, :, begin:end] for buffer in self._buffers)

    def claim(self) -> tuple[int, int]:
        """Count one more token, which the caller writes into slot ``end - 1`` of the buffers.

        Returns ``begin`` and ``end`` of the slots that its query may read, its own among them.
        Comes after an ``update``.
        """
        held = self.held
        self.length += 1
        return self._place(held, 1)

    def can_trim(self, tokens: int) -> bool:
        """Whether the last ``tokens`` tokens can be taken back exactly."""
        return tokens == 0 or 0 < tokens <= self.length == self.held

    def trim(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens, which ``can_trim`` has allowed."""
        self.length -= tokens

    def reset(self) -> None:
        """Back to no tokens; buffers stay allocated."""
        self.length = 0
        self._start = 0

    def fork(self) -> TokenSlots:
        """An independent copy of what is held."""
        twin = type(self)(self.window, self.step, self.reserve, self.block)
        twin.length = self.length
        twin._buffers = tuple(buffer[:, :, self._start :].clone() for buffer in self._buffers)
        return twin

    def state(self) -> State:
        """What is held, and the tokens seen."""
        return parallel_state(self.views, length=self.length)

    def load(self, state: State) -> None:
        """Take the place of the slots that gave ``state``."""
        self.length, self._start = state.numbers["length"], 0
        self._buffers = state.parallel()

    def stack(self, others: Sequence[TokenSlots], rows: int) -> None:
        """Hold ``rows`` sequences, first those of all ``others``, which end together.

        What a sequence lacks is zeros. Padding is never garbage: masked attention still multiplies
        it by 0, and 0 * NaN is NaN.
        """
        self.length = max(slots.length for slots in others)
        self._start, self._buffers = 0, ()
        capacity = self._grown(self.held)
        self._buffers = tuple(
            buffer.new_zeros((rows, buffer.shape[1], capacity, buffer.shape[3]))
            for buffer in others[0]._buffers
        )
        row = 0
        for slots in others:
            self.put(row, slots)
            row += slots._buffers[0].shape[0]

    def put(self, row: int, other: TokenSlots) -> None:
        """Replace the sequences from ``row`` on by those of ``other``, no longer than these.

        They end at the same slot; older slots of a shorter one are padding.
        """
        end = self._start + self.held
        for buffer, view in zip(self._buffers, other.views, strict=True):
            buffer[row : row + view.shape[0], :, end - other.held : end] = view

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences."""
        self._buffers = tuple(buffer[rows] for buffer in self._buffers)

    def drop_first(self, tokens: int) -> None:
        """Forget the first ``tokens`` tokens ever seen, held or not; nothing moves."""
        before = self.held
        self.length -= tokens
        self._start += before - self.held

    def make_room(self) -> None:
        """Grow now if ``claim`` would have to. Comes after an ``update``."""
        self._make_room(self.held, 1)

    def _place(self, held: int, new: int) -> tuple[int, int]:
        """Make room for ``new`` slots after those ``held``; where all of them begin and end.

        What falls out of the window now stays readable until the next call only.
        """
        self._make_room(held, new)
        begin, end = self._start, self._start + held + new
        self._start = end - self.held
        return begin, end

    def _make_room(self, held: int, new: int) -> None:
        end = self._start + held + new
        if -(-end // self.block) * self.block > self.capacity:
            # Once a window evicts, its full slack makes moving to the front rare.
            capacity = self._limit if self._start and self._limit else self._grown(held + new)
            self._buffers = tuple(
                _to_front(buffer, self._start, held, capacity) for buffer in self._buffers
            )
            self._start = 0

    def _pass_through(self, news: Sequence[Tensor], held: int) -> tuple[Tensor, ...]:
        """A chunk larger than the window's slack: hand all of it on, keep only its tail.

        The queries in flight need W - 1 + new slots; the buffers never grow to that.
        """
        if held:
            import torch

            old = slice(self._start, self._start + held)
            pairs = zip(self._buffers, news, strict=True)
            news = [torch.cat((buffer[:, :, old], new), dim=2) for buffer, new in pairs]
        kept = self.held
        if kept > self.capacity:
            capacity = self._grown(kept)
            self._buffers = tuple(_to_front(buffer, 0, 0, capacity) for buffer in self._buffers)
        for buffer, tensor in zip(self._buffers, news, strict=True):
            buffer[:, :, :kept] = tensor[:, :, tensor.shape[2] - kept :]
        self._start = 0
        return tuple(news)

    def _grown(self, needed: int) -> int:
        """Capacity for ``needed`` slots: unchanged if it suffices, else more whole steps.

        A large buffer grows by an eighth, so the copying stays constant per token.
        """
        needed = -(-needed // self.block) * self.block
        if needed <= self.capacity:
            return self.capacity
        capacity = max(needed, self.capacity + self.capacity // 8, self.reserve)
        capacity = -(-capacity // self.step) * self.step
        return capacity if self._limit is None else min(capacity, self._limit)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storage behind ``tensors``, each storage counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _to_front(buffer: Tensor, start: int, held: int, capacity: int) -> Tensor:
    """``buffer`` or a larger one with the ``held`` slots from ``start`` moved to the front."""
    if capacity > buffer.shape[2]:
        larger = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[3]))
        larger[:, :, :held] = buffer[:, :, start : start + held]
        larger[:, :, held:] = 0  # a block is read whole; masked, but 0 times garbage may be NaN
        return larger
    # In place, a stride of ``start`` slots at a time, so that no copy overlaps its own source.
    for done in range(0, held, start):
        block = min(start, held - done)
        buffer[:, :, done : done + block] = buffer[:, :, start + done : start + done + block]
    return buffer
