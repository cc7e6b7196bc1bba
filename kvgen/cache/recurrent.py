"""States of a fixed size: what recurrent and convolution layers keep instead of pairs.

Knows torch, nothing of transformers or models.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from kvgen.cache.state import State


class States:
    """Convolution and recurrent states ``[batch, ...]`` of one layer, by their index.

    They sum up every token seen, so nothing can be taken back; a model may also change them in
    place between the calls here.
    """

    def __init__(self) -> None:
        self._convolution: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}
        self.used = False
        """Whether the model has read or written a state since this was last set to False."""

    def started(self, index: int | None = None) -> bool:
        """Whether convolution ``index``, or any, has seen a token."""
        return bool(self._convolution) if index is None else index in self._convolution

    def convolution(self, index: int) -> Tensor | None:
        """The last inputs of convolution ``index``, or ``None`` before the first token."""
        self.used = True
        return self._convolution.get(index)

    def recurrent(self, index: int) -> Tensor | None:
        """Recurrent state ``index``, or ``None`` before the first token."""
        self.used = True
        return self._recurrent.get(index)

    def add_inputs(self, new: Tensor, index: int, kernel: int | None = None) -> Tensor:
        """Follow convolution ``index`` by inputs ``[batch, channels, new]`` (or ``[batch, new]``).

        Keeps the last ``kernel`` of all inputs, zeros before the first, and returns what was kept
        before followed by ``new``. Without ``kernel``, it is as many as the first call brings.
        """
        self.used = True
        kept = self._convolution.get(index)
        if kept is None:
            kernel = kernel or new.shape[-1]
            inputs = pad(new, (max(0, kernel - new.shape[-1]), 0))
            self._convolution[index] = inputs[..., inputs.shape[-1] - kernel :].clone()
        else:
            inputs = kept.new_empty((*kept.shape[:-1], kept.shape[-1] + new.shape[-1]))
            inputs[..., : kept.shape[-1]] = kept
            inputs[..., kept.shape[-1] :] = new
            kept.copy_(inputs[..., inputs.shape[-1] - kept.shape[-1] :])
        return inputs

    def set_convolution(self, inputs: Tensor, index: int) -> Tensor:
        """Replace the last inputs of convolution ``index``; returns what is kept."""
        self.used = True
        return _replace(self._convolution, index, inputs)

    def set_recurrent(self, state: Tensor, index: int) -> Tensor:
        """Replace recurrent state ``index``; returns the one that is kept."""
        self.used = True
        return _replace(self._recurrent, index, state)

    @property
    def bytes_used(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.buffers())

    def buffers(self) -> Sequence[Tensor]:
        """The memory owned."""
        return [*self._convolution.values(), *self._recurrent.values()]

    def can_trim(self, tokens: int) -> bool:
        """Only nothing can be taken back."""
        return tokens == 0

    def trim(self, tokens: int) -> None:
        """Nothing to do for what ``can_trim`` allows."""

    def reset(self) -> None:
        """Back to no tokens."""
        self._convolution.clear()
        self._recurrent.clear()
        self.used = False

    def fork(self) -> States:
        """An independent copy."""
        twin = States()
        twin._convolution = {index: state.clone() for index, state in self._convolution.items()}
        twin._recurrent = {index: state.clone() for index, state in self._recurrent.items()}
        return twin

    def state(self) -> State:
        """Every state under its index."""
        state = State()
        for name, kept in self._named().items():
            state.put(name, State({str(index): one for index, one in kept.items()}))
        return state

    def load(self, state: State) -> None:
        """Take the place of the states that gave ``state``."""
        for name, kept in self._named().items():
            kept.clear()
            kept |= {int(index): one for index, one in state.part(name).tensors.items()}
        self.used = False

    def _named(self) -> dict[str, dict[int, Tensor]]:
        return {"convolution": self._convolution, "recurrent": self._recurrent}

    def stack(self, others: Sequence[States], rows: int) -> None:
        """Hold ``rows`` sequences, first those of all ``others``, which have seen a token each."""
        self._convolution = _empty(others[0]._convolution, rows)
        self._recurrent = _empty(others[0]._recurrent, rows)
        row = 0
        for states in others:
            self.put(row, states)
            row += states.buffers()[0].shape[0]

    def put(self, row: int, other: States) -> None:
        """Replace the sequences from ``row`` on by those of ``other``."""
        pairs = [(self._convolution, other._convolution), (self._recurrent, other._recurrent)]
        for mine, theirs in pairs:
            for index, state in theirs.items():
                mine[index][row : row + state.shape[0]] = state

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences."""
        self._convolution = {i: state[rows] for i, state in self._convolution.items()}
        self._recurrent = {i: state[rows] for i, state in self._recurrent.items()}

    def drop_first(self, tokens: int) -> None:
        """Nothing to do: a state holds no padding."""


def _empty(like: dict[int, Tensor], rows: int) -> dict[int, Tensor]:
    return {index: state.new_zeros((rows, *state.shape[1:])) for index, state in like.items()}


def _replace(kept: dict[int, Tensor], index: int, state: Tensor) -> Tensor:
    if index in kept:
        kept[index].copy_(state)
    else:
        kept[index] = state.clone()
    return kept[index]
