"""Tokens pooled into fewer entries: what compressed attention keeps beside its window.

Knows torch, nothing of transformers or models. A model projects every token to a value and a gate;
as soon as ``rate`` of them have come, it pools them into one entry. Here lie the entries made so
far, the tokens still waiting, and for overlapping pools the last tokens pooled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgen.cache.slots import TokenSlots
from kvgen.cache.state import State, parallel_state


class Pool:
    """Entries ``[batch, entries, dim]`` and waiting tokens ``[batch, waiting, width]``."""

    def __init__(self, rate: int) -> None:
        """``rate`` tokens make one entry."""
        self.rate = rate
        self._entries = TokenSlots(step=64)
        self._waiting: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, Tensor] | None = None

    def add_tokens(self, values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, int]:
        """Take new tokens ``[batch, new, width]``.

        Returns the values and gates that are ready, whole multiples of ``rate``, and the absolute
        position of the first of them.
        """
        position = self._entries.length * self.rate
        if self._waiting is not None:
            values = torch.cat((self._waiting[0], values), dim=1)
            gates = torch.cat((self._waiting[1], gates), dim=1)
        ready = values.shape[1] // self.rate * self.rate
        self._waiting = values[:, ready:].clone(), gates[:, ready:].clone()
        return values[:, :ready], gates[:, :ready], position

    @property
    def length(self) -> int:
        """Tokens seen."""
        waiting = self._waiting[0].shape[1] if self._waiting else 0
        return self._entries.length * self.rate + waiting

    def add_entries(self, entries: Tensor) -> Tensor:
        """Keep new ``entries [batch, new, dim]``; returns all of them."""
        (every,) = self._entries.update(entries.unsqueeze(1))
        return every[:, 0]

    def swap_last(self, values: Tensor, gates: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Keep the last tokens pooled; returns those kept before, or ``None`` twice."""
        before = self._last or (None, None)
        self._last = values.clone(), gates.clone()
        return before

    @property
    def bytes_used(self) -> int:
        """Bytes of entries, waiting tokens and the last ones pooled."""
        held = [*self._entries.views, *(self._waiting or ()), *(self._last or ())]
        return sum(tensor.nbytes for tensor in held)

    def buffers(self) -> Sequence[Tensor]:
        """The memory owned."""
        return [*self._entries.buffers(), *(self._waiting or ()), *(self._last or ())]

    def can_trim(self, tokens: int) -> bool:
        """Pooled tokens are gone, so only nothing can be taken back."""
        return tokens == 0

    def trim(self, tokens: int) -> None:
        """Nothing to do for what ``can_trim`` allows."""

    def reset(self) -> None:
        """Back to no tokens."""
        self._entries.reset()
        self._waiting = self._last = None

    def fork(self) -> Pool:
        """An independent copy."""
        twin = Pool(self.rate)
        twin._entries = self._entries.fork()
        twin._waiting = _copied(self._waiting)
        twin._last = _copied(self._last)
        return twin

    def state(self) -> State:
        """Entries, waiting tokens and the last ones pooled."""
        state = State()
        state.put("entries", self._entries.state())
        state.put("waiting", parallel_state(self._waiting or ()))
        state.put("last", parallel_state(self._last or ()))
        return state

    def load(self, state: State) -> None:
        """Take the place of the pool that gave ``state``."""
        self._entries.load(state.part("entries"))
        self._waiting = _paired(state.part("waiting"))
        self._last = _paired(state.part("last"))


def _paired(state: State) -> tuple[Tensor, Tensor] | None:
    return (state.tensors["0"], state.tensors["1"]) if state.tensors else None


def _copied(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (pair[0].clone(), pair[1].clone())
