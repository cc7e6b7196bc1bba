"""Where a cache stops paying: counted operations and bytes against this machine's measured rates.

No forward is faster than its bytes over the memory bandwidth, nor than its operations over the
rate of a large matrix product (the roofline model: Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvgen.cache.spec import LayerSpec, total_bytes
from kvgen.measure.clock import DeviceClock
from kvgen.measure.explanation import Boundary, Stage
from kvgen.measure.fit import largest
from kvgen.measure.roofline import WeightReads

_SIDE = 1024
_PRODUCTS = 5
_FARTHEST = 1 << 40


def measured_compute(device: Any, dtype: Any) -> float:
    """Multiplications and additions per second of a large matrix product, the best of several."""
    square = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    clock, best = DeviceClock(device), float("inf")
    for _ in range(_PRODUCTS):
        begin = clock.now()
        torch.mm(square, square).sum().item()
        best = min(best, clock.now() - begin)
    return 2 * _SIDE**3 / best


def boundary(
    last: Stage,
    weights: WeightReads,
    specs: Sequence[LayerSpec],
    itemsize: int,
    bandwidth: float | None,
    compute: float | None,
) -> Boundary:
    """The account of the ``last`` stage. Rates in bytes and operations per second, if known."""
    weight_bytes = weights.per_forward(last.tokens)
    read = weight_bytes + last.kv_bytes_used
    per_prefix_token = (last.twin.operations - last.twin.attention_operations) / last.twin.tokens
    step_limit = uncached_limit = compute_bound_from = None
    if bandwidth and compute:
        whole = weights.per_forward(last.twin.tokens)
        step_limit = max(read / bandwidth, last.operations / compute)
        uncached_limit = max(whole / bandwidth, last.twin.operations / compute)
        compute_bound_from = weight_bytes / bandwidth * compute / max(1.0, per_prefix_token)
    return Boundary(
        tokens=last.twin.tokens,
        cached_operations=last.operations,
        uncached_operations=last.twin.operations,
        saved_operations=last.twin.operations - last.operations,
        remaining_attention_operations=last.attention_operations,
        weight_bytes_read=weight_bytes,
        kv_bytes_read=last.kv_bytes_used,
        kv_bytes_per_token=sum(spec.elements_per_token for spec in specs) * itemsize,
        bandwidth_bytes_per_s=bandwidth,
        operations_per_s=compute,
        step_limit_s=step_limit,
        uncached_limit_s=uncached_limit,
        compute_bound_from=compute_bound_from,
        kv_equals_weights_at=context_of(specs, weight_bytes, itemsize),
    )


def context_of(specs: Sequence[LayerSpec], size: int, itemsize: int) -> int | None:
    """The least tokens whose cache takes ``size`` bytes by the formula; ``None`` where none do."""

    def falls_short(tokens: int) -> bool:
        held = total_bytes(specs, tokens, itemsize)
        return held is None or held < size

    short = largest(falls_short, _FARTHEST)
    return None if short == _FARTHEST else short + 1
