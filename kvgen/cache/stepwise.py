"""Pairs stored as they are: buffers that grow in steps, or that are made once for a known length.

Imports no torch before there are tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvgen.cache.policy import PairSlots, Policy
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import LayerSpec
from kvgen.errors import UsageError

_MOST = 1 << 24  # beyond every model's positions


class _Plain(Policy):
    """What both ways of making room share."""

    @property
    def stored(self) -> str:
        """Pairs as they are, whatever room is made for more."""
        return "plain"

    def pair_bytes(self, spec: LayerSpec, tokens: int, itemsize: int) -> int:
        """Every number in the model's dtype."""
        return spec.pair_bytes(tokens, itemsize)


@dataclass(frozen=True)
class Step(_Plain):
    """Buffers grow by ``step`` slots, or by an eighth where that is more (see ``TokenSlots``)."""

    description: ClassVar[str] = "buffers that grow in steps"
    step: int = 256

    def __post_init__(self) -> None:
        """Raises ``UsageError`` for a step below 1, and for one that no memory holds."""
        if self.step < 1:
            raise UsageError(f"a cache grows by at least 1 slot, not by {self.step}")
        if self.step > _MOST:
            raise UsageError(f"a cache grows by at most {_MOST:,} slots, not by {self.step:,}")

    @property
    def growth(self) -> int:
        """As asked for."""
        return self.step

    def slots(self, spec: LayerSpec) -> PairSlots:
        """Empty slots."""
        return TokenSlots(spec.window, self.step)


@dataclass(frozen=True)
class Blocks(Step):
    """As ``Step``, for a reader that takes ``block`` slots at a time."""

    block: int = 1

    @property
    def growth(self) -> int:
        """Whole blocks."""
        return -(-self.step // self.block) * self.block

    def slots(self, spec: LayerSpec) -> PairSlots:
        """Empty slots."""
        return TokenSlots(spec.window, self.growth, block=self.block)


def in_blocks(policy: Policy, block: int) -> Blocks:
    """The same storage for a compiled step, which reads ``block`` slots at a time.

    Raises ``UsageError`` for a policy that a compiled step cannot read.
    """
    if type(policy) is not Step:
        raise UsageError("--compile needs a cache that grows in steps; leave out --cache")
    return Blocks(policy.step, block)


@dataclass(frozen=True)
class Exact(_Plain):
    """Buffers made once, for exactly the tokens that prompt and new tokens will be."""

    description: ClassVar[str] = "buffers of the final size from the start"
    tokens: int | None = None
    """How many; what a run will need, if not given."""

    def __post_init__(self) -> None:
        """Raises ``UsageError`` for less than 1 token."""
        if self.tokens is not None and self.tokens < 1:
            raise UsageError(f"exact,tokens:N needs at least 1 token, not {self.tokens}")

    def slots(self, spec: LayerSpec) -> PairSlots:
        """Empty slots; a window's buffers are bounded as ever."""
        if spec.window is not None or self.tokens is None:
            return TokenSlots(spec.window, self.growth)
        return TokenSlots(step=1, reserve=self.tokens)

    def for_tokens(self, tokens: int) -> Policy:
        """Buffers for ``tokens`` tokens."""
        return replace(self, tokens=tokens) if self.tokens is None else self
