"""How kvgen's cache speaks transformers' cache protocol. The only file that knows it.

transformers' models take a ``Cache`` and ask it three things: how wide the mask must be
(``get_mask_sizes``, before the update), where the queries are (``get_seq_length``), and to store
and return pairs (``update``). ``TransformersCache`` answers from a ``KVCache``; it subclasses the
library's class because several models test the type, and uses none of its storage.

What differs between releases is settled here by what the installed one offers: the name of the
forward's argument (``cache`` since 5.24, ``past_key_values`` before).
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import Tensor
from transformers.cache_utils import Cache

from kvgen.cache.manager import KVCache
from kvgen.cache.spec import FULL
from kvgen.errors import ModelError

SUPPORTED = "5.5 or newer"


def cache_argument(model: Any) -> str:
    """The name by which this model's forward takes a cache.

    Raises ``ModelError`` when it takes none, so that nothing is generated on a wrong assumption.
    """
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ModelError(
        f"{type(model).__name__} (transformers {transformers.__version__}) takes no cache in its "
        f"forward; kvgen supports transformers {SUPPORTED}. Run without a cache: --no-cache"
    )


class TransformersCache(Cache):  # type: ignore[misc]  # transformers publishes no types
    """A ``KVCache`` as transformers' models see it."""

    def __init__(self, kv: KVCache) -> None:
        """``kv`` stays the owner of buffers and position; this object holds no state."""
        super().__init__(layers=[])
        self.kv = kv
        self._first_full = next((i for i, s in enumerate(kv.specs) if s.kind == FULL), 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``[batch, heads, new, dim]`` and return every pair the new queries may read."""
        return self.kv.layers[layer_idx].update(key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Width of the mask for a layer, and the absolute position of its first column."""
        return self.kv.layers[layer_idx].mask_sizes(query_length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the ones being forwarded: the manager's position, for every layer."""
        return self.kv.position

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def is_sliding(self) -> list[bool]:
        """Per layer; transformers sizes the sliding mask from the first that says True."""
        return [spec.window is not None for spec in self.kv.specs]

    @property
    def is_linear(self) -> list[bool]:
        """Per layer whether it keeps a recurrent state only."""
        return [False] * len(self.kv.specs)

    @property
    def is_dummy(self) -> list[bool]:
        """Per layer whether it keeps nothing."""
        return [False] * len(self.kv.specs)

    @property
    def is_compileable(self) -> bool:
        """Whether buffers have fixed addresses; ours grow."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Buffers are made at the first update."""
        return self.kv.position > 0

    def __len__(self) -> int:
        """Layers."""
        return len(self.kv.layers)
