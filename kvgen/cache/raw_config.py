"""A ``config.json`` as it was published, read the way transformers' configuration classes read it.

Imports neither torch nor transformers. Published files leave out what a class has a default for,
and state the kinds of layers by a period, a list of indexes or a letter pattern. Each rule here
names the model types it serves; tests hold the result against the configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvgen.cache.settings import LAYERS, Settings
from kvgen.cache.spec import CHUNKED, CONV, FULL, HYBRID, INDEXED, LINEAR, NOTHING, SLIDING
from kvgen.errors import ModelError

Kinds = Callable[[Settings, int], list[str]]

# Names of the decoder's part in configurations of models that read more than text.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

# What a class supplies where the published file is silent, as far as sizes depend on it.
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"sliding_window": 4096, "num_key_value_heads": 4},
    "gemma3_text": _GEMMA
    | {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "gpt2": {"tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "mamba": {"tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256, "num_key_value_heads": 2},
}


def decoder_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The text decoder's fields, with the kind of every layer spelled out in ``layer_types``.

    Raises ``ModelError`` naming the field when the kinds cannot be told.
    """
    fields = _text_part(raw)
    if "model_type" not in fields:
        raise ModelError("the configuration lacks model_type, which says how to read it")
    model_type = str(fields["model_type"])
    if model_type in _CLASS_ONLY:
        raise ModelError(
            f"{model_type} decides the sizes of its layers in code, not in its configuration file; "
            "kvgen measures it (kvgen generate), but cannot size it from the file"
        )
    for name, value in _DEFAULTS.get(model_type, {}).items():
        if fields.get(name) is None:
            fields[name] = value
    for name in ("layers_block_type", "hybrid_override_pattern"):  # nemotron_h
        if fields.get(name):
            fields["num_hidden_layers"] = len(fields[name])
            break
    # qwen2, qwen3 and their kin state a window that this switch leaves unused.
    if fields.get("use_sliding_window") is False or (
        model_type in _WINDOW_IS_OPTIONAL and not fields.get("use_sliding_window")
    ):
        fields["sliding_window"] = None
    if fields.get("layer_types") is None and fields.get("layers_block_type") is None:
        kinds = _kinds(fields, model_type)
        if kinds is not None:
            fields["layer_types"] = kinds
    return fields


def _text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """gemma3, llama4, mistral3, qwen2_5_vl and others: the decoder is a part of the whole."""
    part = next((raw[name] for name in _TEXT_PARTS if isinstance(raw.get(name), Mapping)), None)
    if part is None:
        return dict(raw)
    inherited = {name: raw[name] for name in ("torch_dtype", "dtype") if name in raw}
    outer = raw.get("model_type")
    return inherited | {"model_type": f"{outer}_text"} | dict(part)


def _kinds(fields: dict[str, Any], model_type: str) -> list[str] | None:
    rule = _RULES.get(model_type)
    if rule is None:
        if model_type in _STATED_ONLY:
            raise ModelError(
                f"the configuration lacks layer_types, and kvgen has no rule for the layers of "
                f"{model_type}; load the model once with transformers and save its configuration"
            )
        return None
    whole = Settings(fields)
    return rule(whole, whole.count(*LAYERS))


def _period(default: int, field: str = "", other: str = SLIDING) -> Kinds:
    """Full attention on every n-th layer."""

    def kinds(whole: Settings, layers: int) -> list[str]:
        period = (whole.integer(field) if field else None) or default
        return [FULL if (i + 1) % period == 0 else other for i in range(layers)]

    return kinds


def _begins_period(default: int, field: str = "") -> Kinds:
    """Full attention on the first of every n layers."""

    def kinds(whole: Settings, layers: int) -> list[str]:
        period = (whole.integer(field) if field else None) or default
        return [SLIDING if i % period else FULL for i in range(layers)]

    return kinds


def _upper_layers_slide(whole: Settings, layers: int) -> list[str]:
    if whole.get("sliding_window") is None:
        return [FULL] * layers
    first = whole.count("max_window_layers")
    return [SLIDING if i >= first else FULL for i in range(layers)]


def _lower_even_layers_slide(whole: Settings, layers: int) -> list[str]:
    if whole.get("sliding_window") is None:
        return [FULL] * layers
    first = whole.count("max_window_layers")
    return [SLIDING if i % 2 == 0 and i < first else FULL for i in range(layers)]


def _all(kind: str) -> Kinds:
    return lambda whole, layers: [kind] * layers


def _attention_at_offset(whole: Settings, layers: int) -> list[str]:
    period, offset = whole.count("attn_layer_period"), whole.integer("attn_layer_offset") or 0
    return [FULL if i % period == offset else LINEAR for i in range(layers)]


def _listed(field: str, otherwise: str, if_absent: str) -> Kinds:
    """Full attention on the layers that a field lists; without it, ``if_absent`` on all."""

    def kinds(whole: Settings, layers: int) -> list[str]:
        listed = whole.get(field)
        if listed is None:
            return [if_absent] * layers
        return [FULL if i in listed else otherwise for i in range(layers)]

    return kinds


_LETTERS = {"M": LINEAR, "*": FULL, "-": NOTHING, "E": NOTHING}


def _letters(whole: Settings, layers: int) -> list[str]:
    pattern = whole.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise ModelError("the configuration lacks hybrid_override_pattern and layers_block_type")
    unknown = sorted(set(pattern) - set(_LETTERS))
    if unknown:
        raise ModelError(
            f"the configuration's hybrid_override_pattern has {unknown[0]!r}; known are M, *, - "
            "and E"
        )
    return [_LETTERS[letter] for letter in pattern]


def _rope_layers_are_chunked(whole: Settings, layers: int) -> list[str]:
    """llama4: layers with rotary positions see their chunk only."""
    chunked = CHUNKED if whole.get("attention_chunk_size") is not None else FULL
    stated = whole.get("no_rope_layers")
    if not stated:
        interval = whole.integer("no_rope_layer_interval") or 4
        stated = [(i + 1) % interval != 0 for i in range(layers)]
    return [chunked if rotary else FULL for rotary in stated]


_WINDOW_IS_OPTIONAL = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_RULES: dict[str, Kinds] = {
    "afmoe": _period(4, "global_attn_every_n_layers"),
    "axk2": _all(INDEXED),
    "bamba": _listed("attn_layer_indices", LINEAR, LINEAR),
    "cohere2": _period(4, "sliding_window_pattern"),
    "cwm": _begins_period(4),
    "deepseek_v32": _all(INDEXED),
    "dots1": _upper_layers_slide,
    "falcon_h1": _all(HYBRID),
    "falcon_mamba": _all(LINEAR),
    "gemma2": _period(2),
    "gemma3_text": _period(6, "sliding_window_pattern"),
    "gemma3n_text": _period(5),
    "glm_moe_dsa": _all(INDEXED),
    "gpt_oss": _period(2),
    "granite_swa": _begins_period(4),
    "granitemoehybrid": _all(LINEAR),
    "jamba": _attention_at_offset,
    "kolibri1": _period(5),
    "lfm2": _listed("full_attn_idxs", CONV, FULL),
    "llama4_text": _rope_layers_are_chunked,
    "mamba": _all(LINEAR),
    "mamba2": _all(LINEAR),
    "modernbert-decoder": _begins_period(3, "global_attn_every_n_layers"),
    "nemotron_h": _letters,
    "olmo3": _period(4),
    "olmo_hybrid": _period(4, other=LINEAR),
    "qwen2": _upper_layers_slide,
    "qwen2_moe": _lower_even_layers_slide,
    "qwen3": _upper_layers_slide,
    "qwen3_moe": lambda whole, layers: (
        [FULL] * layers if whole.get("sliding_window") is None else [SLIDING] * layers
    ),
    "qwen3_5_moe_text": _period(4, "full_attention_interval", LINEAR),
    "qwen3_5_text": _period(4, "full_attention_interval", LINEAR),
    "qwen3_next": _period(4, "full_attention_interval", LINEAR),
    "vaultgemma": _period(2),
}
# Their classes derive the kinds in ways not transcribed here.
_STATED_ONLY = (
    *("bailing_hybrid", "beam", "cohere2_moe", "cohere_compass_text", "deepseek_v4", "exaone4"),
    *("exaone_moe", "flint", "granitemoe_swa", "hy_v4", "laguna", "lara_mini", "lfm3", "mellum"),
    *("kimi_linear", "mimo_v2_flash", "minimax", "zaya"),
)
# Their classes change other fields too, such as sizes that differ from layer to layer.
_CLASS_ONLY = (
    *("dory", "dots3_note_text", "gemma4_text", "gemma4_unified_text", "inkling_text"),
    *("inkling2_loop_text", "inkling2_text", "jetmoe", "longcat_flash", "recurrent_gemma"),
    *("zamba", "zamba2"),
)
