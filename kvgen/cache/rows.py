"""Several sequences in one cache, so that one forward serves them all.

They end at the same slot; a shorter one begins with padding, which whoever forwards must mask.
Knows layers, nothing of transformers or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, inference_mode

from kvgen.cache.manager import KVCache
from kvgen.cache.policy import Policy
from kvgen.cache.recurrent import States
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import SPARSE, LayerSpec


def why_alone(specs: Sequence[LayerSpec], policy: Policy) -> str | None:
    """Why sequences of different lengths cannot share a cache; ``None`` if they can."""
    for layer in policy.make(specs).layers:
        if layer.pools:
            return f"a {layer.spec.kind} layer pools tokens by their place in the sequence"
        if layer.spec.kind == SPARSE:
            return f"a {layer.spec.kind} layer chooses tokens by their place in the sequence"
        if layer.index_positions is not None:
            return f"a {layer.spec.kind} layer keeps positions that all sequences share"
        if not all(isinstance(part, TokenSlots | States) for part in layer.parts):
            return "the storage policy treats tokens by their place in the sequence"
    return None


def stack(caches: Sequence[KVCache], rows: int) -> KVCache:
    """One cache of ``rows`` sequences, first all those of ``caches``, which it copies."""
    whole = KVCache(caches[0].specs, policy=caches[0].policy)
    whole.position = max(cache.position for cache in caches)
    with inference_mode():
        for part, *each in zip(_parts(whole), *map(_parts, caches), strict=True):
            part.stack(each, rows)
    return whole


def put(cache: KVCache, row: int, other: KVCache) -> None:
    """Replace sequence ``row`` by the one of ``other``, which is no longer; copies that one."""
    # Buffers that grew within a forward are inference tensors, which change only in this mode.
    with inference_mode():
        for part, new in zip(_parts(cache), _parts(other), strict=True):
            part.put(row, new)


def keep(cache: KVCache, rows: list[int]) -> None:
    """Keep only these sequences. Copies them."""
    for part in _parts(cache):
        part.keep(rows)


def drop_first(cache: KVCache, tokens: int) -> None:
    """Forget the first ``tokens`` tokens, which are padding in every sequence; copies nothing."""
    for part in _parts(cache):
        part.drop_first(tokens)
    cache.position -= tokens


def keeps_every_slot(specs: Sequence[LayerSpec], policy: Policy) -> bool:
    """Whether a cache holds each of its earlier states as well, as ``lift`` needs it."""
    return all(
        isinstance(part, TokenSlots) and part.window is None for part in _parts(policy.make(specs))
    )


def lift(cache: KVCache, first: int, last: int) -> list[list[Tensor]]:
    """By part, copies of the slots from ``first`` to ``last`` of one that ``keeps_every_slot``."""
    return [[view[:, :, first:last].clone() for view in part.views] for part in _parts(cache)]


def lay(cache: KVCache, pairs: list[list[Tensor]], first: int, last: int) -> None:
    """Append what was lifted, from its slot ``first`` to ``last``."""
    with inference_mode():
        for part, tensors in zip(_parts(cache), pairs, strict=True):
            part.update(*(tensor[:, :, first:last] for tensor in tensors))
    cache.position += last - first


def _parts(cache: KVCache) -> list[Any]:
    """Those of all layers; where rows are moved, ``why_alone`` has found them to know how."""
    return [part for layer in cache.layers for part in layer.parts]
