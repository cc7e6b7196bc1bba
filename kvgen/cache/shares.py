"""What each rank stores when a model's key/value heads are shared out over several.

Imports neither torch nor transformers. Pairs are shared out by head. What has no heads is whole on
every rank: the latent of multi-head latent attention, recurrent states, what chooses among pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    if queries is not None and queries % ranks:
        raise _uneven("query", queries, ranks)
    latent = fields.integer("kv_lora_rank") is not None
    shares = []
    for spec in specs:
        heads = spec.num_key_value_heads
        if not heads or spec.compressed or (latent and heads == 1):
            shares.append(spec)
        elif heads % ranks:
            raise _uneven("key/value", heads, ranks)
        else:
            shares.append(replace(spec, num_key_value_heads=heads // ranks))
    return shares


def _uneven(which: str, heads: int, ranks: int) -> UsageError:
    fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return UsageError(
        f"{heads} {which} heads cannot be shared out evenly over {ranks} ranks; use one of "
        f"{fitting}"
    )
