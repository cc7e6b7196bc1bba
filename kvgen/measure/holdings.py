"""What a cache layer holds at this moment, and proof of what stayed the same.

Reads the tensors of kvgen's own cache; changes none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgen.cache.layers import Layer
from kvgen.cache.slots import storage_bytes
from kvgen.cache.spec import LayerSpec
from kvgen.measure.explanation import Cell, LayerFacts, LayerState, Stored


def layer_facts(index: int, spec: LayerSpec, itemsize: int) -> LayerFacts:
    """One layer's spec in words and numbers; ``itemsize`` bytes per stored number."""
    return LayerFacts(
        index=index,
        kind=spec.kind,
        keeps=_keeps(spec),
        window=spec.window,
        num_key_value_heads=spec.num_key_value_heads,
        bytes_per_token=spec.elements_per_token * itemsize,
    )


def _keeps(spec: LayerSpec) -> str:
    kept = []
    if spec.has_pairs and spec.window is not None:
        kept.append(f"the last {spec.window - 1:,} key/value pairs")
    elif spec.has_pairs:
        kept.append("a key/value pair per token")
    if spec.index_dim:
        kept.append("an index key per token")
    if spec.compressed:
        kept.append("older tokens pooled into fewer entries")
    if spec.has_states:
        kept.append("a state of fixed size that sums up every token")
    return ", ".join(kept) or "nothing of its own"


@dataclass
class Before:
    """What a layer held before a stage: where, and copies to compare with."""

    start: int
    end: int
    pairs: list[Tensor]
    states: str | None


def before(layer: Layer) -> Before:
    """Take note of a layer. Copies its pairs, so that what is compared later is what was there."""
    start, end = _span(layer)
    views = [view.clone() for view in _views(layer)]
    return Before(start, end, views, _digest(_states(layer)))


def after(index: int, layer: Layer, was: Before) -> LayerState:
    """The layer after a stage, its earlier pairs held against what they were."""
    start, end = _span(layer)
    earlier = max(0, was.end - max(start, was.start))
    sha_before, sha_after, unchanged = was.states, _digest(_states(layer)), None
    if earlier:
        first = was.end - earlier
        then = [view[:, :, first - was.start :] for view in was.pairs]
        now = [view[:, :, first - start : was.end - start] for view in _views(layer)]
        sha_before, sha_after = _digest(then), _digest(now)
        unchanged = sha_before == sha_after
    buffers = layer.pairs.buffers() if layer.pairs is not None else ()
    return LayerState(
        index=index,
        stored=_stored(layer),
        first_position=start if layer.pairs is not None else None,
        end_position=end if layer.pairs is not None else None,
        slots=max((buffer.shape[2] for buffer in buffers), default=0),
        bytes_used=layer.bytes_used,
        bytes_allocated=storage_bytes(layer.buffers()),
        earlier=earlier,
        sha256_before=sha_before,
        sha256_after=sha_after,
        unchanged=unchanged,
    )


def cells(spec: LayerSpec, start: int, count: int, keys_read: int | None, total: int) -> list[Cell]:
    """A cached stage's row: tokens ``start`` to ``start + count`` are fed, ``total`` come in all.

    ``keys_read`` is what the newest query was seen to read, its own key included.
    """
    read = max(0, keys_read - count) if keys_read is not None else 0
    kept: Cell = "none"
    if spec.has_states or spec.compressed:
        kept = "state"
    elif keys_read is not None:
        kept = "evicted"
    row: list[Cell] = [kept] * (start - read)
    row += ["read"] * read
    return row + _fed(count, total - start - count)


def twin_cells(start: int, count: int, total: int) -> list[Cell]:
    """The uncached row: everything before ``start`` runs again."""
    row: list[Cell] = ["recomputed"] * start
    return row + _fed(count, total - start - count)


def _fed(count: int, ahead: int) -> list[Cell]:
    row: list[Cell] = ["computed"] * count
    row += ["ahead"] * ahead
    return row


def _span(layer: Layer) -> tuple[int, int]:
    """Positions of the pairs held, from the first to one past the last; empty without pairs."""
    pairs = layer.pairs
    return (pairs.length - pairs.held, pairs.length) if pairs is not None else (0, 0)


def _views(layer: Layer) -> tuple[Tensor, ...]:
    return layer.pairs.views if layer.pairs is not None else ()


def _states(layer: Layer) -> Sequence[Tensor]:
    return layer.states.buffers() if layer.states is not None else ()


def _stored(layer: Layer) -> list[Stored]:
    names = ("keys",) if layer.spec.value_dim == 0 else ("keys", "values")
    stored = [Stored(n, list(v.shape)) for n, v in zip(names, _views(layer), strict=False)]
    index = layer.index.views if layer.index is not None else ()
    stored += [Stored("index", list(view.shape)) for view in index]
    stored += [Stored("state", list(state.shape)) for state in _states(layer)]
    pooled = [buffer for pool in layer.pools for buffer in pool.buffers()]
    return stored + [Stored("pool", list(buffer.shape)) for buffer in pooled]


def _digest(tensors: Sequence[Tensor]) -> str | None:
    """SHA-256 over the tensors' bytes, in order; ``None`` for none."""
    if not tensors:
        return None
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
