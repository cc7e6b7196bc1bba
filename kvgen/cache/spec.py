"""What one layer of a KV cache stores, and how many bytes that is. Imports neither torch nor
transformers, so sizes can be predicted from a configuration alone.

The byte formula for one attention layer holding ``t`` tokens of a batch of ``b`` sequences is

    b * t * num_key_value_heads * (key_dim + value_dim) * itemsize

with ``itemsize`` bytes per stored number. Queries are not in it: no later token reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.errors import ModelError

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps for one sequence.

    ``window`` is W keys including the query's own, as transformers defines it, so W - 1 pairs
    stay between steps; ``None`` means every pair stays.
    """

    kind: str
    num_key_value_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Numbers stored for one token: keys plus values over all key/value heads."""
        return self.num_key_value_heads * (self.key_dim + self.value_dim)

    def tokens_held(self, tokens: int) -> int:
        """Pairs kept between steps after ``tokens`` tokens have passed through the layer."""
        return tokens if self.window is None else min(tokens, self.window - 1)

    def bytes_used(self, tokens: int, itemsize: int, batch: int = 1) -> int:
        """The formula: bytes of the pairs kept after ``tokens`` tokens."""
        return batch * self.tokens_held(tokens) * self.elements_per_token * itemsize


def total_bytes(specs: Sequence[LayerSpec], tokens: int, itemsize: int, batch: int = 1) -> int:
    """The formula summed over all layers, in bytes."""
    return sum(spec.bytes_used(tokens, itemsize, batch) for spec in specs)


def specs_from_config(config: Any) -> list[LayerSpec]:
    """One spec per decoder layer, in layer order.

    ``config`` is a text decoder's configuration: a transformers config object or the mapping read
    from a ``config.json``. Raises ``ModelError`` when a field is missing or a layer kind is one
    that kvgen has no layer for.
    """
    layers = _need_int(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _need_int(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    kv_heads = _int(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    head_dim = _int(config, "head_dim")
    if head_dim is None:
        head_dim = _need_int(config, "hidden_size", "n_embd", "d_model") // heads
    return [
        LayerSpec(kind, kv_heads, head_dim, head_dim, _window(config, kind))
        for kind in _layer_kinds(config, layers)
    ]


def _layer_kinds(config: Any, layers: int) -> list[str]:
    """The attention kind of each layer, as the configuration states or implies it."""
    kinds = _get(config, "layer_types")
    if kinds is None:
        if _int(config, "sliding_window") is not None:
            kind = SLIDING
        elif _int(config, "attention_chunk_size") is not None:
            kind = CHUNKED
        else:
            kind = FULL
        return [kind] * layers
    if len(kinds) != layers:
        raise ModelError(
            f"the configuration names {len(kinds)} layer types for {layers} layers; "
            "they must be as many"
        )
    for kind in kinds:
        if kind not in (FULL, SLIDING, CHUNKED):
            raise ModelError(
                f"kvgen's cache has no layer of kind {kind!r} (it has {FULL}, {SLIDING} and "
                f"{CHUNKED}); run without a cache: --no-cache"
            )
    return list(kinds)


def _window(config: Any, kind: str) -> int | None:
    if kind == FULL:
        return None
    window = _need_int(config, "sliding_window" if kind == SLIDING else "attention_chunk_size")
    if window < 1:
        raise ModelError(f"a window of {window} keys cannot hold the query's own key")
    return window


def _get(config: Any, *names: str) -> Any:
    """The first of ``names`` that the configuration sets, or None."""
    for name in names:
        is_mapping = isinstance(config, Mapping)
        value = config.get(name) if is_mapping else getattr(config, name, None)
        if value is not None:
            return value
    return None


def _int(config: Any, *names: str) -> int | None:
    value = _get(config, *names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"the configuration's {names[0]} must be a whole number, not {value!r}")
    return value


def _need_int(config: Any, *names: str) -> int:
    value = _int(config, *names)
    if value is None:
        raise ModelError(f"the configuration lacks {names[0]}, so the cache cannot be sized")
    if value < 1:
        raise ModelError(f"the configuration's {names[0]} is {value}; it must be at least 1")
    return value
