"""The buffers of one layer. Knows torch and ``LayerSpec``, nothing of transformers or models.

Every layer speaks the same few verbs:

``update(keys, values)``   store new pairs, return all pairs the new queries may read
``mask_sizes(q)``          predict, before ``update``, how many pairs that will be and at which
                           absolute position they begin
``trim(n)``                forget the last n tokens, or refuse and change nothing
``reset()``                back to zero tokens, buffers kept
``fork()``                 an independent copy

Pairs always lie in order of absolute position, so any mask, bias or padding a model applies by
position stays right. Two numbers are kept apart: ``length`` counts every token the layer has seen
(absolute), ``_start`` is the slot of the oldest pair still held (physical).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvgen.cache.spec import LayerSpec


class CannotTrimError(ValueError):
    """The tokens asked back are no longer there to restore."""


class PairLayer:
    """Key/value buffers ``[batch, num_key_value_heads, capacity, head_dim]`` for one layer.

    Serves full attention (every pair stays) and windowed attention (W - 1 pairs stay between
    steps). Appending writes the new slots only. Older pairs are copied in two amortised cases: a
    full buffer moves into a larger one, and a windowed layer that reaches the end of its slack
    moves the pairs it still needs to the front.
    """

    def __init__(self, spec: LayerSpec, step: int = 256) -> None:
        """``step`` is the number of slots a buffer grows by, and a window's slack."""
        self.spec = spec
        self.step = step
        self.length = 0
        self._start = 0
        self._limit = None if spec.window is None else spec.window - 1 + step
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def held(self) -> int:
        """Pairs a later query can still read; what the byte formula counts."""
        return self.spec.tokens_held(self.length)

    @property
    def capacity(self) -> int:
        """Slots allocated per sequence."""
        return 0 if self._keys is None else self._keys.shape[2]

    @property
    def keys(self) -> Tensor | None:
        """The keys held, ``[batch, num_key_value_heads, held, key_dim]``, oldest first; a view."""
        return self._view(self._keys)

    @property
    def values(self) -> Tensor | None:
        """The values held, ``[batch, num_key_value_heads, held, value_dim]``; a view."""
        return self._view(self._values)

    @property
    def bytes_used(self) -> int:
        """Bytes of the pairs held, counted on the tensors themselves."""
        views = (self.keys, self.values)
        return sum(view.numel() * view.element_size() for view in views if view is not None)

    def buffers(self) -> list[Tensor]:
        """The memory this layer owns, whole."""
        return [buffer for buffer in (self._keys, self._values) if buffer is not None]

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Pairs that ``update`` with ``query_length`` tokens returns, and the first's position."""
        return self.held + query_length, self.length - self.held

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store pairs ``[batch, heads, new, dim]``; return those held before, then these.

        The result may be a view into the buffers, valid until the next call.
        """
        held, new = self.held, keys.shape[2]
        self.length += new
        if self._keys is None or self._values is None:
            self._keys = keys.new_empty((*keys.shape[:2], 0, keys.shape[3]))
            self._values = values.new_empty((*values.shape[:2], 0, values.shape[3]))
        if self._limit is not None and held + new > self._limit - self.step // 2:
            return self._pass_through(keys, values, held)
        if self._start + held + new > self.capacity:
            # Once a window evicts, its full slack makes moving to the front rare.
            capacity = self._limit if self._start and self._limit else self._grown(held + new)
            self._keys = _to_front(self._keys, self._start, held, capacity)
            self._values = _to_front(self._values, self._start, held, capacity)
            self._start = 0
        begin, end = self._start, self._start + held + new
        self._keys[:, :, end - new : end] = keys
        self._values[:, :, end - new : end] = values
        # What falls out of the window now stays readable for this call only.
        self._start = end - self.held
        return self._keys[:, :, begin:end], self._values[:, :, begin:end]

    def can_trim(self, tokens: int) -> bool:
        """Whether the last ``tokens`` tokens can be taken back exactly."""
        return tokens == 0 or 0 < tokens <= self.length == self.held

    def trim(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens. Raises ``CannotTrimError``, changing nothing."""
        if not self.can_trim(tokens):
            raise CannotTrimError(
                f"cannot take back {tokens} tokens: this {self.spec.kind} layer has seen "
                f"{self.length} and holds the last {self.held}"
            )
        self.length -= tokens

    def reset(self) -> None:
        """Back to no tokens; buffers stay allocated."""
        self.length = 0
        self._start = 0

    def fork(self) -> PairLayer:
        """An independent copy of what is held."""
        twin = PairLayer(self.spec, self.step)
        twin.length = self.length
        if self._keys is not None and self._values is not None:
            twin._keys = self._keys[:, :, self._start :].clone()
            twin._values = self._values[:, :, self._start :].clone()
        return twin

    def _view(self, buffer: Tensor | None) -> Tensor | None:
        return None if buffer is None else buffer[:, :, self._start : self._start + self.held]

    def _pass_through(self, keys: Tensor, values: Tensor, held: int) -> tuple[Tensor, Tensor]:
        """A chunk larger than the window's slack: hand all of it on, keep only its tail.

        The queries in flight need W - 1 + new pairs; the buffers never grow to that.
        """
        assert self._keys is not None
        assert self._values is not None
        if held:
            old = slice(self._start, self._start + held)
            keys = torch.cat((self._keys[:, :, old], keys), dim=2)
            values = torch.cat((self._values[:, :, old], values), dim=2)
        kept = self.held
        if kept > self.capacity:
            capacity = self._grown(kept)
            self._keys = _to_front(self._keys, 0, 0, capacity)
            self._values = _to_front(self._values, 0, 0, capacity)
        self._keys[:, :, :kept] = keys[:, :, keys.shape[2] - kept :]
        self._values[:, :, :kept] = values[:, :, values.shape[2] - kept :]
        self._start = 0
        return keys, values

    def _grown(self, needed: int) -> int:
        """Capacity for ``needed`` slots: unchanged if it suffices, else more whole steps.

        A large buffer grows by an eighth, so the copying stays constant per token.
        """
        if needed <= self.capacity:
            return self.capacity
        capacity = max(needed, self.capacity + self.capacity // 8)
        capacity = -(-capacity // self.step) * self.step
        return capacity if self._limit is None else min(capacity, self._limit)


def _to_front(buffer: Tensor, start: int, held: int, capacity: int) -> Tensor:
    """``buffer`` or a larger one with the ``held`` slots from ``start`` moved to the front."""
    if capacity > buffer.shape[2]:
        larger = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[3]))
        larger[:, :, :held] = buffer[:, :, start : start + held]
        return larger
    # In place, a stride of ``start`` slots at a time, so that no copy overlaps its own source.
    for done in range(0, held, start):
        block = min(start, held - done)
        buffer[:, :, done : done + block] = buffer[:, :, start + done : start + done + block]
    return buffer
