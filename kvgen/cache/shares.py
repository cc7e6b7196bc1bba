"""What each rank stores when a model's key/value heads are shared out over several.

Imports neither torch nor transformers. Pairs are shared out by head. What has no heads is whole on
every rank: the latent of multi-head latent attention, recurrent states, what chooses among pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from kvgen.cache.settings import QUERY_HEADS, Settings
from kvgen.cache.spec import LayerSpec
from kvgen.errors import UsageError


def share_of(specs: Sequence[LayerSpec], fields: Settings, ranks: int) -> list[LayerSpec]:
    """The specs of one rank out of ``ranks``; ``fields`` are the decoder's settings.

    Raises ``UsageError`` when heads do not divide evenly: a head is never split or kept twice.
    """
    if ranks == 1:
        return list(specs)
    queries = fields.integer(*QUERY_HEADS)
    latent = fields.integer("kv_lora_rank") is not None
    counts = [
        0
        if one.compressed or (latent and one.num_key_value_heads == 1)
        else one.num_key_value_heads
        for one in specs
    ]
    common = gcd(queries or 0, *counts)
    for which, heads in [("query", queries or 0), *(("key/value", heads) for heads in counts)]:
        if heads % ranks:
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise UsageError(
                f"{heads} {which} heads cannot be shared out evenly over {ranks} ranks; use one of "
                f"{fitting}"
            )
    return [
        replace(spec, num_key_value_heads=heads // ranks) if heads else spec
        for spec, heads in zip(specs, counts, strict=True)
    ]
