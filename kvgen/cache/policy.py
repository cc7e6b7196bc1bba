"""What a storage policy is: how the pairs of one layer are stored, and what that costs; and the
verbs of what stores them.

Imports neither torch nor transformers, so that costs can be predicted without them; a policy's
slots import torch once there are tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvgen.cache.spec import LayerSpec
from kvgen.cache.state import State

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.cache.manager import KVCache


class Part(Protocol):
    """What a layer asks of each of its parts, whatever that keeps."""

    @property
    def bytes_used(self) -> int:
        """Bytes a later query can still read, counted on the tensors themselves."""

    def buffers(self) -> Sequence[Tensor]:
        """The memory owned, whole."""

    def can_trim(self, tokens: int) -> bool:
        """Whether the last ``tokens`` tokens can be taken back."""

    def trim(self, tokens: int) -> None:
        """Take them back, which ``can_trim`` has allowed."""

    def reset(self) -> None:
        """Back to no tokens."""

    def state(self) -> State:
        """What is held, to be written somewhere."""

    def load(self, state: State) -> None:
        """Take the place of a part of the same kind that gave ``state``."""


class PairSlots(Part, Protocol):
    """Where the pairs of one layer lie, tensors ``[batch, heads, tokens, dim]``.

    ``length`` counts every token seen, ``held`` those that an update can still return.
    """

    @property
    def length(self) -> int:
        """Tokens seen."""

    @property
    def held(self) -> int:
        """Tokens a later update can still return."""

    @property
    def views(self) -> tuple[Tensor, ...]:
        """What is held as attention reads it, oldest first; empty before any token."""

    def sizes(self, new: int) -> tuple[int, int]:
        """Tokens that ``update`` with ``new`` ones returns, and the position that the first of
        them has in the mask. The last ``new`` of them end at the newest token's own position.
        """

    def update(self, *news: Tensor) -> tuple[Tensor, ...]:
        """Store tensors ``[batch, heads, new, dim]``; return those held before, then these."""

    def fork(self) -> PairSlots:
        """An independent copy of what is held."""


@dataclass(frozen=True)
class Policy(ABC):
    """A way of storing pairs. The fields of a subclass are its options on the command line."""

    description: ClassVar[str]
    tolerance: ClassVar[float | None] = None
    """How far logits may move, relative to the largest; infinity promises nothing, ``None`` says
    that the policy changes no prediction."""
    gaps: ClassVar[bool] = False
    """Whether tokens between others may be gone, so that a slot does not tell a position."""

    @property
    def growth(self) -> int:
        """Slots by which buffers grow, also those of what is no pair."""
        return 256

    @property
    def exact(self) -> bool:
        """Whether predictions are what they would be without a cache."""
        return self.tolerance is None

    @property
    def stored(self) -> str:
        """What is stored, in a word: policies that say the same can read each other's caches."""
        options = (f"{one.name}:{getattr(self, one.name)}" for one in fields(self))
        return ",".join((type(self).__name__.lower(), *options))

    @property
    def even_span(self) -> int:
        """Any so many successive tokens add the same number of bytes, once there are many."""
        return 1

    @property
    def note(self) -> str | None:
        """What a reader of the output must know; ``None`` for an exact policy."""
        return None

    @abstractmethod
    def pair_bytes(self, spec: LayerSpec, tokens: int, itemsize: int) -> int:
        """The formula: bytes of one sequence's pairs in one layer after ``tokens`` tokens.

        ``itemsize`` is the bytes of a number in the model's dtype.
        """

    @abstractmethod
    def slots(self, spec: LayerSpec) -> PairSlots:
        """Empty storage for the pairs of a layer."""

    def for_tokens(self, tokens: int) -> Policy:
        """The policy for a sequence whose final length is known."""
        return self

    def make(self, specs: Sequence[LayerSpec]) -> KVCache:
        """An empty cache that stores pairs this way."""
        from kvgen.cache.manager import KVCache

        return KVCache(specs, policy=self)
