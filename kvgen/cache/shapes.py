"""From a model's configuration to one ``LayerSpec`` per cache layer.

Imports neither torch nor transformers. Most models follow one rule; those that do not are listed
by name with what they do instead. The rules are held against the tensors of every supported type
in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvgen.cache.raw_config import decoder_settings
from kvgen.cache.settings import HIDDEN, LAYERS, QUERY_HEADS, Settings
from kvgen.cache.spec import (
    CHUNKED,
    COMPRESSED_SPARSE,
    CONV,
    FULL,
    HEAVILY_COMPRESSED,
    HYBRID,
    HYBRID_SLIDING,
    INDEXED,
    LINEAR,
    NOTHING,
    RECURRENT,
    SLIDING,
    SPARSE,
    WINDOWED,
    CompressedSpec,
    LayerSpec,
)
from kvgen.cache.states import states_of
from kvgen.errors import ModelError

_KNOWN = (FULL, SLIDING, CHUNKED, LINEAR, CONV, HYBRID, HYBRID_SLIDING, INDEXED, SPARSE, NOTHING)
_COMPRESSED = (HEAVILY_COMPRESSED, COMPRESSED_SPARSE)
# Names of older configurations, and layers that are no attention at all.
_SYNONYMS = {
    "mamba": LINEAR,
    "recurrent": LINEAR,
    "attention": FULL,
    "moe": NOTHING,
    "mlp": NOTHING,
}


def specs_from_config(config: Any, expand_latent: bool = False) -> list[LayerSpec]:
    """One spec per cache layer, in layer order.

    ``config`` is a text decoder's transformers config object, or the mapping read from a
    ``config.json``, which may be of more than the decoder (see ``raw_config``). Multi-head latent
    attention is stored as the latent vector, or with ``expand_latent`` as the keys and values made
    from it. Raises ``ModelError`` when a field is missing or a layer kind is one that kvgen has no
    layer for.
    """
    whole = Settings(decoder_settings(config) if isinstance(config, Mapping) else config)
    kinds = _layer_kinds(whole)
    specs = [
        _spec(kind, index, whole.of_layer(index), expand_latent) for index, kind in enumerate(kinds)
    ]
    specs += _repeated_layers(whole, specs)
    return _with_index_positions(whole, specs)


def _layer_kinds(whole: Settings) -> list[str]:
    """The kind of each layer, as the configuration states or implies it."""
    # In encoder-decoder configurations the common name counts the encoder's layers.
    layers = whole.integer("decoder_layers") or whole.count(*LAYERS)
    stated = whole.get("layer_types", "layers_block_type")
    if stated is None:
        kinds = [_implied_kind(whole.of_layer(index)) for index in range(layers)]
    else:
        kinds = [_SYNONYMS.get(kind, kind) for kind in stated]
    if len(kinds) != layers:
        raise ModelError(
            f"the configuration names {len(kinds)} layer types for {layers} layers; "
            "they must be as many"
        )
    for index in _layers_without_storage(whole, layers):
        kinds[index] = NOTHING
    for kind in kinds:
        if kind not in _KNOWN + _COMPRESSED:
            raise ModelError(
                f"kvgen's cache has no layer of kind {kind!r}; run without a cache: --no-cache"
            )
    return kinds


def _implied_kind(layer: Settings) -> str:
    if layer.integer("sliding_window") is not None:
        return SLIDING
    return FULL if layer.integer("attention_chunk_size") is None else CHUNKED


def _layers_without_storage(whole: Settings, layers: int) -> list[int]:
    """Layers that read another layer's pairs, or an encoder's."""
    sharing = whole.get("kv_sharing_modes")
    if sharing is not None:
        shared = [index for index, mode in enumerate(sharing) if mode == "reuse"]
    else:
        shared = list(range(layers - (whole.integer("num_kv_shared_layers") or 0), layers))
    crossing = whole.get("cross_attention_layers") or []
    return [*shared, *(index for index in crossing if index < layers)]


def _spec(kind: str, index: int, layer: Settings, expand_latent: bool) -> LayerSpec:
    if kind == NOTHING:
        return LayerSpec(kind)
    states = states_of(layer, kind, index) if kind in RECURRENT else ()
    if kind in (LINEAR, CONV):
        return LayerSpec(kind, states=states)
    window = _window(layer, kind) if kind in WINDOWED else None
    heads, key_dim, value_dim = _pair_shape(layer, kind, expand_latent)
    if kind in _COMPRESSED:
        compressed = _compressed(layer, kind, key_dim)
        return LayerSpec(kind, heads, key_dim, 0, window, compressed=compressed)
    index_dim = _index_dim(layer, index) if kind in (INDEXED, SPARSE) else 0
    return LayerSpec(kind, heads, key_dim, value_dim, window, index_dim, states=states)


def _window(layer: Settings, kind: str) -> int:
    return layer.count("attention_chunk_size" if kind == CHUNKED else "sliding_window")


def _pair_shape(layer: Settings, kind: str, expand_latent: bool) -> tuple[int, int, int]:
    """Key/value heads, numbers per key, numbers per value."""
    model_type = layer.get("model_type")
    if kind == HYBRID_SLIDING and layer.get("swa_head_dim") is not None:
        heads, dim = layer.count("swa_num_key_value_heads"), layer.count("swa_head_dim")
        return heads, dim, dim
    heads = layer.count(*QUERY_HEADS)
    if layer.integer("kv_lora_rank"):
        return _latent_shape(layer, heads, expand_latent)
    dim = layer.integer("head_dim") or layer.count(*HIDDEN) // heads
    kv_heads = layer.integer("num_key_value_heads", "num_kv_heads") or heads
    if model_type == "falcon":
        # The newer architecture repeats its few heads before they reach the cache.
        few = layer.get("multi_query") and not layer.get("new_decoder_architecture")
        return (1 if few else heads), dim, dim
    if model_type == "mimo_v2_flash":
        more = 2 if kind == SLIDING else 1
        return kv_heads * more, dim, layer.count("v_head_dim")
    return kv_heads, dim, dim


def _latent_shape(layer: Settings, heads: int, expand: bool) -> tuple[int, int, int]:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): the latent and the shared
    rotary key, or every head's keys and values made from them.
    """
    rotary = layer.count("qk_rope_head_dim")
    if expand:
        return heads, layer.count("qk_nope_head_dim") + rotary, layer.count("v_head_dim")
    return 1, layer.count("kv_lora_rank"), rotary


def _index_dim(layer: Settings, index: int) -> int:
    """Numbers per token that an indexer keeps; 0 where it reads another layer's."""
    kinds = layer.get("indexer_types")
    if kinds is not None and kinds[index] == "shared":
        return 0
    return layer.count("index_head_dim", "indexer_head_dim")


def _compressed(layer: Settings, kind: str, dim: int) -> tuple[CompressedSpec, ...]:
    rate = layer.get("compress_rates")[kind]
    if kind == HEAVILY_COMPRESSED:
        return (CompressedSpec(rate, dim, dim),)
    index_dim = layer.count("index_head_dim")
    return (
        CompressedSpec(rate, dim, 2 * dim, overlap=True),
        CompressedSpec(rate, index_dim, 2 * index_dim, overlap=True),
    )


def _repeated_layers(whole: Settings, specs: list[LayerSpec]) -> list[LayerSpec]:
    """Layers that a looped model runs again with a cache of their own for each pass."""
    if whole.get("recurrent_kv_cache_mode") == "per_loop":
        begin = whole.count("n_input_layers")
        looped = specs[begin : begin + whole.count("n_recurrent_layers")]
        return looped * (whole.count("n_recurrent_loops") - 1)
    passes = whole.integer("loop_num_passes")
    if passes is not None:
        begin, end = whole.get("loop_layer_index_start"), whole.get("loop_layer_index_end")
        return specs[begin:end] * (passes - 1)
    return []


def _with_index_positions(whole: Settings, specs: list[LayerSpec]) -> list[LayerSpec]:
    """qwen4_exp keeps three positions per token, once, on its first indexed layer."""
    if not str(whole.get("model_type")).startswith("qwen4_exp"):
        return specs
    first = next((i for i, spec in enumerate(specs) if spec.kind == INDEXED), None)
    return [replace(s, index_positions=3) if i == first else s for i, s in enumerate(specs)]
