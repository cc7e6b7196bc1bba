"""What one layer of a KV cache stores, and how many bytes that is. Imports neither torch nor
transformers, so sizes can be predicted from a configuration alone.

The byte formula for the key/value pairs of one attention layer that holds ``t`` tokens of each of
``b`` sequences is

    b * t * num_key_value_heads * (key_dim + value_dim) * itemsize

with ``itemsize`` bytes per stored number. Queries are not in it: no later token reads them. A
storage policy may store the same pairs in other ways, and then brings a formula of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
CONV = "conv"
HYBRID = "hybrid"
HYBRID_SLIDING = "hybrid_sliding"
INDEXED = "indexed_attention"
SPARSE = "minimax_m3_sparse"
HEAVILY_COMPRESSED = "heavily_compressed_attention"
COMPRESSED_SPARSE = "compressed_sparse_attention"
NOTHING = "dummy"

WINDOWED = (SLIDING, CHUNKED, HYBRID_SLIDING, HEAVILY_COMPRESSED, COMPRESSED_SPARSE)
RECURRENT = (LINEAR, CONV, HYBRID, HYBRID_SLIDING)


@dataclass(frozen=True)
class StateSpec:
    """One fixed-size state, ``shape`` without the batch axis.

    ``itemsize`` is bytes per number where the model fixes it, ``None`` where the state has the
    model's own dtype.
    """

    shape: tuple[int, ...]
    itemsize: int | None = None

    def bytes_used(self, itemsize: int) -> int:
        """Bytes for one sequence in a model of ``itemsize`` bytes per number."""
        return prod(self.shape) * (self.itemsize or itemsize)


@dataclass(frozen=True)
class CompressedSpec:
    """Tokens pooled ``rate`` at a time into entries of ``dim`` numbers.

    Those that do not fill an entry yet wait with a value and a gate of ``width`` numbers each.
    With ``overlap`` the newest entry's tokens stay, ``dim`` numbers for value and gate each.
    """

    rate: int
    dim: int
    width: int
    overlap: bool = False

    def elements(self, tokens: int) -> int:
        """Numbers kept for one sequence after ``tokens`` tokens."""
        entries, waiting = divmod(tokens, self.rate)
        kept = entries * self.dim + 2 * waiting * self.width
        return kept + (2 * self.rate * self.dim if self.overlap and entries else 0)


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps for one sequence; a field left at its default is not kept.

    ``window`` is W keys including the query's own, as transformers defines it, so W - 1 pairs
    stay between steps; ``None`` means every pair stays. ``value_dim`` is 0 where values are the
    very tensors that are stored as keys. ``index_dim`` numbers per token serve to choose which
    pairs are read, ``index_positions`` whole numbers per token (8 bytes each) go with them.
    ``states`` are fixed in size; ``None`` where no rule is known and the first token tells.
    """

    kind: str
    num_key_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    index_dim: int = 0
    index_positions: int = 0
    states: tuple[StateSpec, ...] | None = ()
    compressed: tuple[CompressedSpec, ...] = ()

    @property
    def has_pairs(self) -> bool:
        """Whether the layer keeps key/value pairs."""
        return self.num_key_value_heads > 0

    @property
    def has_states(self) -> bool:
        """Whether the layer keeps recurrent or convolution states."""
        return self.kind in RECURRENT or bool(self.states)

    @property
    def elements_per_token(self) -> int:
        """Numbers stored for one token: keys plus values over all key/value heads."""
        return self.num_key_value_heads * (self.key_dim + self.value_dim)

    def tokens_held(self, tokens: int) -> int:
        """Pairs kept between steps after ``tokens`` tokens have passed through the layer."""
        return tokens if self.window is None else min(tokens, self.window - 1)

    def pair_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence's pairs, stored as they are, after ``tokens`` tokens."""
        return self.tokens_held(tokens) * self.elements_per_token * itemsize

    def bytes_used(
        self, tokens: int, itemsize: int, batch: int = 1, policy: PairFormula | None = None
    ) -> int | None:
        """The formula: bytes kept after ``tokens`` tokens; ``None`` where no rule is known.

        Without a ``policy`` pairs are stored as they are, ``itemsize`` bytes per number.
        """
        if self.states is None:
            return None
        pairs = (policy.pair_bytes if policy else LayerSpec.pair_bytes)(self, tokens, itemsize)
        numbers = tokens * self.index_dim + sum(part.elements(tokens) for part in self.compressed)
        fixed = sum(state.bytes_used(itemsize) for state in self.states) if tokens else 0
        return batch * (pairs + numbers * itemsize + tokens * self.index_positions * 8 + fixed)


class PairFormula(Protocol):
    """How many bytes a storage policy needs for the pairs of one layer."""

    def pair_bytes(self, spec: LayerSpec, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence's pairs after ``tokens`` tokens of a model of ``itemsize``."""


def total_bytes(
    specs: Sequence[LayerSpec],
    tokens: int,
    itemsize: int,
    batch: int = 1,
    policy: PairFormula | None = None,
) -> int | None:
    """The formula summed over all layers, in bytes; ``None`` where one of them has no rule."""
    each = [spec.bytes_used(tokens, itemsize, batch, policy) for spec in specs]
    known = [count for count in each if count is not None]
    return sum(known) if len(known) == len(each) else None
