"""Tiny random models for every causal-LM type that transformers knows.

One generic shrinker turns a type's default configuration into a toy of the same architecture, so
that a test can hold any family against its own uncached forward. What the shrinker cannot guess is
one row in `OVERRIDES`; a type that cannot be tested this way is one row in `UNUSABLE`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 128
WINDOW = 8
HEADS = 4

# Sizes by field name. head_dim differs from hidden_size / heads on purpose, as key and value sizes
# differ from one another, so that a wrong size rule cannot pass by coincidence.
SIZES: dict[str, int] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "unpadded_vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("dff", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "router_hidden_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads"), 2),
    "swa_num_key_value_heads": 4,
    **dict.fromkeys(("head_dim", "kv_channels", "dim_head"), 8),
    "swa_head_dim": 12,
    "global_head_dim": 12,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    # sparse attention
    "index_n_heads": 16,  # few heads score many keys exactly 0, and ties are broken by length
    "index_head_dim": 8,
    "index_topk": 6,
    # windows
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "window_size"), WINDOW),
    "local_attention": 2 * WINDOW,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "moe_num_experts": 4,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    # linear attention and state-space layers
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 6),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
    "lru_width": 64,
    # lengths
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("max_target_positions", "model_max_length", "context_length"), 256),
    # rarer parts
    "rotary_dim": 4,
    "pronunciation_vocab_size": 16,
    "shape_vocab_size": 16,
    "shape_embed_dim": 16,
    "pronunciation_embed_dim": 16,
    "audio_vocab_size": 32,
    "zero_expert_num": 2,
    "output_channels": 16,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "adapter_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "hc_mult": 2,
}
# Switches by field name: decode causally, use the window, let no scale flatten the logits.
SWITCHES: dict[str, Any] = {
    "is_decoder": True,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "logit_scale": 1.0,
    "tie_word_embeddings": False,  # a tied head mostly repeats the last token
}
SIZES_EVEN_IF_NONE = ("head_dim", "num_key_value_heads")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
ENCODER_COUNTS = ("encoder_layers", "num_encoder_layers", "num_decoder_layers")
LAYER_LISTS = ("layer_types", "layers_block_type")

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 6,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "hc_lowrank": 8,
    "eos_token_id": 2,
}
UNCLAMPED = {"time_step_min": 1e-6, "time_step_floor": 1e-6}
DOTS = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 12,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 6,
}
SHARED = {"num_kv_shared_layers": 2, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL]}

# What the shrinker cannot guess: type -> (reason, fields).
OVERRIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("default has no attention", {"attn_layer_indices": [1]}),
    "big_bird": ("block-sparse is no causal decoder", {"attention_type": "original_full"}),
    "bigbird_pegasus": (
        "block-sparse is no causal decoder",
        {"attention_type": "original_full"},
    ),
    "cohere_compass_text": (
        "no default rotary parameters; the window is optional",
        {
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
                FULL: None,
            },
        },
    ),
    "dbrx": (
        "the model reads fields that its class lacks or leaves empty",
        {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    ),
    "deepseek_v2": ("no default expert count", {"num_experts_per_tok": 2}),
    "deepseek_v4": (
        "compress often enough to happen in a short test",
        {
            "layer_types": [
                SLIDING,
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 2,
                "heavily_compressed_attention": 4,
            },
            "head_dim": 16,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.25,
        },
    ),
    "dory": (
        "layers outside and inside the loop",
        {
            "layer_types": [SLIDING, SLIDING, FULL, FULL],
            "n_input_layers": 1,
            "n_recurrent_layers": 2,
            "n_output_layers": 1,
        },
    ),
    "dots1": (
        "no default experts",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    ),
    "dots3_note": ("sizes of the window layers have names of their own", DOTS),
    "dots3_note_text": ("sizes of the window layers have names of their own", DOTS),
    "gemma3n_text": ("both kinds stored and shared", SHARED),
    "gemma4": (
        "per-layer head_dim and key heads, keys reused as values",
        {
            "text_config": {
                "global_head_dim": 12,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
            }
        },
    ),
    "gemma4_text": ("per-layer head_dim, shared layers", {"global_head_dim": 12, **SHARED}),
    "gemma4_unified": ("per-layer head_dim", {"text_config": {"global_head_dim": 12}}),
    "gemma4_unified_text": ("per-layer head_dim", {"global_head_dim": 12}),
    "glm_moe_dsa": ("a shared indexer", {"indexer_types": ["full", "shared", "full"]}),
    "gpt_neo": (
        "the list of kinds is nested",
        {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    ),
    "granitemoehybrid": ("default has no attention", {"layer_types": [LINEAR, FULL, LINEAR]}),
    "helium": ("heads * head_dim must be the hidden size", {"head_dim": 16}),
    "hrm_text": ("layers are multiplied by the cycles", {"num_hidden_layers": 1}),
    "hy_v4": ("a shared indexer", {"indexer_types": ["full", "shared", "full"]}),
    "inkling2_loop_text": (
        "layers outside and inside the loop",
        {
            "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"],
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "n_layers_per_attn_res_block": 1,
        },
    ),
    "inkling_text": ("logits divided by the width", {"logits_mup_width_multiplier": 1.0}),
    "jamba": (
        "attention every other layer",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    ),
    "laguna": ("the window is optional", {"layer_types": [FULL, SLIDING, FULL]}),
    "lfm2": ("default has no convolution", {"layer_types": ["conv", FULL, "conv"]}),
    "lfm2_moe": ("no default layer kinds", {"layer_types": ["conv", FULL, "conv"]}),
    "mamba2": ("head names mean the state's heads", {"num_heads": 8, "head_dim": 16}),
    "mellum": ("the window is optional", {"layer_types": [FULL, SLIDING, FULL]}),
    "minimax_m3_vl_text": (
        "sparse layers are optional",
        {
            "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_block_size": 4,
            "index_n_heads": 2,
            "index_topk_blocks": 2,
        },
    ),
    "nemotron_h": ("only the multi-token path clamps steps at time_step_min", UNCLAMPED),
    "phi4_multimodal": (
        "a large audio tower",
        {
            "audio_config": {
                "num_blocks": 1,
                "nemo_conv_channels": 16,
                "ext_pw_out_channel": 16,
                "depthwise_separable_out_channel": 16,
            }
        },
    ),
    "qwen4_exp": ("indexer and n-gram memory are optional", INDEXER),
    "qwen4_exp_text": ("indexer and n-gram memory are optional", INDEXER),
    "smollm3": ("a layer without rotary", {"no_rope_layer_interval": 2}),
    "xmod": ("an adapter must be chosen", {"default_language": "en_XX"}),
    "zamba2": ("only the multi-token path clamps steps at time_step_min", UNCLAMPED),
    "zaya": (
        "one expert per token; the window is optional",
        {
            "num_experts_per_tok": 1,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "sliding_window": WINDOW,
        },
    ),
}

# Types that no cache like ours can decode, or that cannot be built from a configuration alone.
UNUSABLE: dict[str, str] = {
    "blt": "groups bytes into patches over several decoders, each with a cache of its own",
    "cpmant": "adds its prompt tokens on every call, so a second call starts another sequence",
    "gemma3n": "its vision tower needs timm and Pillow (gemma3n_text is the same decoder)",
    "gemma4_assistant": "reads the key/value pairs of another model",
    "gemma4_unified_assistant": "reads the key/value pairs of another model",
    "minimax": "insists on a cache class of its own",
    "moshi": "its cache keeps a window that its uncached forward does not apply",
    "musicgen": "wants one row of ids per codebook",
    "musicgen_melody": "wants one row of ids per codebook",
    "openai-gpt": "ignores any cache",
    "prophetnet": "predicts several tokens at once, over streams of its own",
    "reformer": "caches hash buckets in a class of its own",
    "rwkv": "keeps its state in tensors of its own",
    "xlm": "keeps its state in a dictionary of its own",
    "xlnet": "keeps memories in tensors of its own",
    "xlstm": "insists on a cache class of its own",
}

# Types that count positions from the padding id: explicit position ids shift them.
OWN_POSITIONS = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)

# Types whose toy multiplies rounding: cached and uncached agree in float64, loosely in float32.
LOOSE: dict[str, float] = {"dory": 2e-3}


@dataclasses.dataclass(frozen=True)
class Family:
    """What a test may ask of one model type.

    Attributes:
        model_type: the key in transformers' causal-LM mapping.
        reason: why no test uses it, empty when it is usable.
        own_positions: pass no position ids, the model counts otherwise.
        tolerance: largest logit difference to accept in float32.
    """

    model_type: str
    reason: str = ""
    own_positions: bool = False
    tolerance: float = 1e-4

    @property
    def usable(self) -> bool:
        """Whether the type can be decoded with a cache handed to it."""
        return not self.reason


def causal_lm_types() -> list[str]:
    """Every model type that `AutoModelForCausalLM` maps."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Field name -> default value, as the class declares them."""
    fields = {}
    for field in dataclasses.fields(config_class):
        factory = field.default_factory
        fields[field.name] = field.default if factory is dataclasses.MISSING else factory()
    return fields


def _shrunk_fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The arguments that make `config_class` tiny, layer count and layer lists aside."""
    fields = _fields(config_class)
    small: dict[str, Any] = {}
    for name, default in fields.items():
        is_number = isinstance(default, int) and not isinstance(default, bool)
        if name in SWITCHES and default is not None:
            small[name] = SWITCHES[name]
        elif name in SIZES and (
            (is_number and default > 0) or (default is None and name in SIZES_EVEN_IF_NONE)
        ):
            small[name] = SIZES[name]
        elif name in ENCODER_COUNTS:  # `num_hidden_layers` of a decoder reads the encoder's
            small[name] = 3
        elif is_number and name.endswith(("token_id", "token_index")) and default >= VOCAB:
            small[name] = VOCAB - 1 - len(small) % 8
        elif isinstance(default, list | tuple) and name.endswith("token_id"):
            small[name] = [2]
    if "use_sliding_window" in fields:
        small["sliding_window"] = WINDOW
    if "kv_lora_rank" in fields:  # latent attention: one key per query head, head_dim names the
        small["num_key_value_heads"] = HEADS  # rotary part
        if "head_dim" in fields:
            small["head_dim"] = SIZES["qk_rope_head_dim"]
    return small


def _every_kind(layers: list[str]) -> list[str]:
    """A short list with every kind of `layers`, in its own order where that fits in six layers."""
    kinds = list(dict.fromkeys(layers))
    prefix = layers[: max(layers.index(kind) for kind in kinds) + 1]
    short = prefix if len(prefix) <= 6 else kinds * 2
    return (short + layers[len(short) :])[: max(len(short), 3)]


def _tiny(config_class: type[PreTrainedConfig], fields: dict[str, Any]) -> PreTrainedConfig:
    names = _fields(config_class)
    small = _shrunk_fields(config_class)
    if getattr(config_class, "sub_configs", None):
        default = config_class()
        for name in config_class.sub_configs:
            part = getattr(default, name)
            if part is not None:
                small[name] = _tiny(type(part), fields.get(name, {}))
        fields = {key: value for key, value in fields.items() if key not in default.sub_configs}
    small |= fields
    count = next((name for name in LAYER_COUNTS if name in names), "")
    layer_list = next((name for name in LAYER_LISTS if name in names), "")
    if layer_list and layer_list not in small:
        without_count = {name: value for name, value in small.items() if name != count}
        layers = getattr(config_class(**without_count), layer_list)
        if layers:
            small[layer_list] = _every_kind(list(layers))
    if count:
        small.setdefault(count, len(small.get(layer_list, ())) or 3)
    if "mlp_layer_types" in names and "mlp_layer_types" not in small:
        kinds = list(dict.fromkeys(config_class().mlp_layer_types or []))
        if kinds:
            small["mlp_layer_types"] = (kinds + kinds[-1:] * small[count])[: small[count]]
    return config_class(**small)


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a toy of `model_type`; `overrides` win over every rule."""
    _, fields = OVERRIDES.get(model_type, ("", {}))
    config_class = CONFIG_MAPPING[model_type]
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].config_class
    if wanted in config_class.sub_configs.values():  # a composite type's model takes only its text
        config_class = wanted
    return _tiny(config_class, {**fields, **overrides})


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A toy of `model_type` in float32 and eval mode, the same for the same seed.

    Matrices are redrawn at the scale of their fan-in, so that attention looks somewhere and greedy
    text varies. Vectors (norms, biases, decay rates) keep their initial value plus a little noise,
    which leaves them in the range their formulas need.
    """
    config = tiny_config(model_type, **overrides)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=torch.float32)
    redraw(model, torch.Generator().manual_seed(seed))
    return model.eval()


def redraw(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every parameter of `model` anew, in the ranges that `tiny_model` describes."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in model.named_parameters():
        weight = parameter.data
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim < 2 or name.endswith("A_log"):
            weight.add_(0.1 * noise)
            continue
        if min(weight.shape[-2:]) > 8:  # else every hidden state shares one large direction
            noise -= noise.mean(-1, keepdim=True)
            noise -= noise.mean(-2, keepdim=True)
        if parameter is head:
            noise *= 3 / math.sqrt(weight.shape[-1])
        elif id(parameter) not in embeddings:
            noise /= math.sqrt(weight[0].numel())
        weight.copy_(noise)


FAMILIES: dict[str, Family] = {
    model_type: Family(
        model_type,
        reason=UNUSABLE.get(model_type, ""),
        own_positions=model_type in OWN_POSITIONS,
        tolerance=LOOSE.get(model_type, 1e-4),
    )
    for model_type in causal_lm_types()
}
