"""Pairs stored as small whole numbers: ``int8`` and ``int4``.

A group of numbers shares a minimum and a scale, 2 bytes each: x ~ code * scale + minimum, with
codes from 0 to 2**bits - 1. Values and, by default, keys are grouped along the dims of one token;
``keys:channel`` groups the keys of one channel over successive tokens instead, because some
channels of keys are far larger than others (Liu et al., KIVI, 2024). The newest tokens stay as
they are. What is quantised is read back whole at every update, in the model's dtype.

Which tokens are quantised depends on the length alone: whole blocks of them, as soon as ``recent``
newer tokens follow. So the bytes have a formula, before and after any trim.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from kvgen.cache.policy import PairSlots, Policy
from kvgen.cache.quantized_slots import QuantizedSlots
from kvgen.cache.spec import LayerSpec
from kvgen.errors import UsageError

_BLOCK = 16
_SCALE_BYTES = 4  # a minimum and a scale in 16 bits each


@dataclass(frozen=True)
class Quantized(Policy):
    """See the module; ``bits`` is 8 or 4."""

    bits: ClassVar[int]
    group: int = 64
    """Numbers that share a scale."""
    recent: int = 16
    """Newest tokens that are always kept as they are."""
    keys: str = "token"
    """``token`` or ``channel``: what a key's group runs along."""

    def __post_init__(self) -> None:
        """Raises ``UsageError`` for options that mean nothing."""
        if self.group < 2:
            raise UsageError(f"a group shares a scale among 2 numbers or more, not {self.group}")
        if self.recent < 0:
            raise UsageError(f"recent:N is a number of tokens, not {self.recent}")
        if self.keys not in ("token", "channel"):
            raise UsageError(f"keys are quantised per token or per channel, not {self.keys!r}")

    @property
    def even_span(self) -> int:
        """A block."""
        return self.block

    @property
    def note(self) -> str:
        """That rounding changes predictions."""
        return (
            f"int{self.bits} rounds stored keys and values to {2**self.bits} levels, which changes "
            "the model's predictions"
        )

    @property
    def block(self) -> int:
        """Tokens that are quantised together."""
        return self.group if self.keys == "channel" else _BLOCK

    def quantized_until(self, tokens: int) -> int:
        """How many of the first ``tokens`` tokens are quantised, counted from position 0."""
        return max(0, tokens - self.recent) // self.block * self.block

    def pair_bytes(self, spec: LayerSpec, tokens: int, itemsize: int) -> int:
        """Codes, scales and the newest tokens."""
        held = spec.tokens_held(tokens)
        first, until = tokens - held, self.quantized_until(tokens)
        old = max(0, until - first)
        key, value = spec.key_dim, spec.value_dim
        recent = (held - old) * (key + value) * itemsize
        codes = old * (self.code_bytes(key) + self.code_bytes(value))
        scales = old * self.groups(value) * _SCALE_BYTES
        if self.keys == "token":
            scales += old * self.groups(key) * _SCALE_BYTES
        elif old:
            scales += (until - first // self.block * self.block) // self.block * key * _SCALE_BYTES
        return spec.num_key_value_heads * (recent + codes + scales)

    def code_bytes(self, dim: int) -> int:
        """Bytes of the codes of one token in one head."""
        return -(-dim * self.bits // 8)

    def groups(self, dim: int) -> int:
        """Groups along ``dim`` numbers, all of one size: the largest that divides it."""
        if dim == 0:
            return 0
        size = next(n for n in range(min(self.group, dim), 0, -1) if dim % n == 0)
        return dim // size

    def slots(self, spec: LayerSpec) -> PairSlots:
        """Empty slots."""
        return QuantizedSlots(self, spec.window)


@dataclass(frozen=True)
class Int8(Quantized):
    """256 levels. The tolerance is some five times what SmolLM2 loses on a long prompt."""

    description: ClassVar[str] = "pairs quantised to 8 bits"
    bits: ClassVar[int] = 8
    tolerance: ClassVar[float] = 0.02


@dataclass(frozen=True)
class Int4(Quantized):
    """16 levels, two to a byte."""

    description: ClassVar[str] = "pairs quantised to 4 bits"
    bits: ClassVar[int] = 4
    tolerance: ClassVar[float] = inf
    keys: str = "channel"
