"""transformers' own caches, as competitors to measure against. kvgen never runs on them.

They speak the verbs that a comparison needs of any cache: position, fork, and bytes counted on the
tensors really held.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

from kvgen.cache.slots import storage_bytes


class RivalCache:
    """One of the library's caches. ``raw`` is what a model's forward takes."""

    def __init__(self, raw: Any) -> None:
        """``raw`` is a transformers ``Cache``."""
        self.raw = raw
        self.position = 0

    @classmethod
    def growing(cls, config: Any) -> RivalCache:
        """What ``generate()`` makes by default; ``config`` is the text decoder's."""
        return cls(DynamicCache(config=config))

    @classmethod
    def static(cls, config: Any, capacity: int) -> RivalCache:
        """Buffers of ``capacity`` tokens, all of them attended to at every step."""
        return cls(StaticCache(config=config, max_cache_len=capacity))

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` that a forward has stored."""
        self.position += tokens

    def fork(self) -> RivalCache:
        """An independent copy."""
        twin = RivalCache(copy.deepcopy(self.raw))
        twin.position = self.position
        return twin

    @property
    def bytes_used(self) -> int:
        """Bytes of pairs that hold tokens, of the slots a layer has."""
        used = 0
        for layer in self.raw.layers:
            for pairs in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if isinstance(pairs, Tensor) and pairs.numel():
                    slots = pairs.shape[-2]
                    used += pairs.nbytes // slots * min(slots, self.position)
        return used

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storage behind the layers' tensors, each storage counted once."""
        kept = (value for layer in self.raw.layers for value in vars(layer).values())
        return storage_bytes(value for value in kept if isinstance(value, Tensor))
