"""An estimate of what a forward needs beside weights and cache. Imports no torch.

The largest tensors that live at the same time: hidden states, the widest of the projections, the
keys and values that attention reads for one layer, the mask, and the logits of one position. Real
peaks depend on kernels and allocators; the estimate is meant to be right within a factor of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgen.cache.settings import HIDDEN, QUERY_HEADS, Settings
from kvgen.cache.spec import LayerSpec


def working_bytes(
    fields: Settings, specs: Sequence[LayerSpec], tokens: int, chunk: int, itemsize: int
) -> int:
    """Bytes for a forward of ``chunk`` tokens that ends a sequence of ``tokens``."""
    fields = fields.of_layer(0)  # where layers differ, the whole configuration gives no number
    hidden = fields.integer(*HIDDEN) or 0
    width = _widest(fields.get("intermediate_size", "n_inner", "ffn_dim")) or 4 * hidden
    experts = fields.integer("num_experts_per_tok") or 0
    expert_width = (fields.integer("moe_intermediate_size") or width) * experts
    heads = fields.integer(*QUERY_HEADS) or 1
    widest = max((spec.key_dim + spec.value_dim for spec in specs), default=0)
    # Residual, normed and new hidden states; gate, up and their product; queries and output.
    each = 3 * hidden + 3 * max(width, expert_width) + heads * widest
    # Attention may widen grouped heads to as many as there are queries.
    attended = max((spec.elements_per_token for spec in specs), default=0)
    mask = chunk * tokens if chunk > 1 and any(spec.has_pairs for spec in specs) else 0
    logits = (fields.integer("vocab_size") or 0) * (itemsize + 4)
    return (chunk * each + tokens * attended) * itemsize + mask + logits


def _widest(value: Any) -> int:
    """The number, or the largest where a configuration lists one for each layer."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return max((n for n in numbers if isinstance(n, int)), default=0)
