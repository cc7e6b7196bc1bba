"""How many parameters a configuration makes, to within a percent. No torch.

Matrices are counted, norms and most biases are not. Tests hold the counts against the models that
transformers builds.
"""

from __future__ import annotations

from typing import Any

from kvgen.cache.raw_config import decoder_settings
from kvgen.cache.settings import HIDDEN, POSITIONS, QUERY_HEADS, Settings
from kvgen.cache.shapes import specs_from_config
from kvgen.cache.spec import CONV, HYBRID, LINEAR, NOTHING, LayerSpec
from kvgen.errors import ModelError


def estimate_parameters(config: dict[str, Any]) -> int | None:
    """Parameters of the text decoder; ``None`` where a kind of layer has no count here."""
    try:
        fields = Settings(decoder_settings(config))
        specs = specs_from_config(config)
        hidden = fields.count(*HIDDEN)
        vocabulary = fields.count("vocab_size") * hidden
        tied = fields.get("tie_word_embeddings")
        total = vocabulary * (1 if tied else 2)
        if fields.get("model_type") in ("gpt2", "opt"):  # positions are learned
            total += fields.count(*POSITIONS) * hidden
        for index, spec in enumerate(specs):
            mixer = _mixer(fields, spec, hidden)
            if mixer is None:
                return None
            total += mixer + _feed_forward(fields, index, hidden)
    except ModelError:
        return None
    return total


def _mixer(fields: Settings, spec: LayerSpec, hidden: int) -> int | None:
    """What attends or carries a state; ``None`` where its matrices are not known here."""
    if spec.kind == NOTHING:
        return 0
    if spec.kind in (LINEAR, CONV, HYBRID):
        recurrent = _recurrent(fields, hidden)
        if recurrent is None or spec.kind != HYBRID:
            return recurrent
        return recurrent + _attention(fields, spec, hidden)
    return _attention(fields, spec, hidden)


def _attention(fields: Settings, spec: LayerSpec, hidden: int) -> int:
    heads = fields.count(*QUERY_HEADS)
    latent = fields.integer("kv_lora_rank")
    if latent:
        content, rotary = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
        value = fields.count("v_head_dim")
        rank, width = fields.integer("q_lora_rank"), heads * (content + rotary)
        queries = rank * (hidden + width) if rank else hidden * width
        keys = hidden * (latent + rotary) + latent * heads * (content + value)
        return queries + keys + heads * value * hidden
    queries = hidden * heads * spec.key_dim
    if str(fields.get("model_type")).startswith(("qwen3_next", "qwen3_5")):
        queries *= 2  # a gate beside every query
    pairs = hidden * spec.elements_per_token
    return queries + pairs + heads * spec.value_dim * hidden


def _recurrent(fields: Settings, hidden: int) -> int | None:
    model_type = fields.get("model_type")
    if fields.get("linear_num_value_heads") is not None:
        keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
        heads = fields.count("linear_num_value_heads")
        values = heads * fields.count("linear_value_head_dim")
        convolution = (2 * keys + values) * fields.count("linear_conv_kernel_dim")
        return hidden * (2 * keys + 2 * values + 2 * heads) + convolution + values * hidden
    if model_type in ("mamba", "falcon_mamba", "jamba"):
        inner = (fields.integer("mamba_expand", "expand") or 2) * hidden
        state = fields.count("mamba_d_state", "state_size")
        rank = fields.integer("mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
        kernel = fields.count("mamba_d_conv", "conv_kernel")
        return inner * (2 * hidden + kernel + 2 * rank + 3 * state + hidden)
    if model_type in ("mamba2", "falcon_h1", "bamba"):
        heads = fields.count("num_heads" if model_type == "mamba2" else "mamba_n_heads")
        inner = heads * fields.count("head_dim" if model_type == "mamba2" else "mamba_d_head")
        shared = fields.count("n_groups", "mamba_n_groups")
        shared *= 2 * fields.count("state_size", "mamba_d_state")
        kernel = fields.count("conv_kernel", "mamba_d_conv")
        return hidden * (2 * inner + shared + heads) + (inner + shared) * kernel + inner * hidden
    return None


_TWO_MATRICES = ("gpt2", "opt", "gpt_neox", "gptj", "bloom", "falcon", "phi", "starcoder2", "mpt")


def _feed_forward(fields: Settings, index: int, hidden: int) -> int:
    model_type = fields.get("model_type")
    if str(model_type) in ("mamba", "mamba2", "falcon_mamba"):
        return 0
    matrices = 2 if model_type in _TWO_MATRICES else 3
    width = fields.integer("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    experts = fields.integer("n_routed_experts", "num_experts", "num_local_experts") or 0
    if not experts or not _has_experts(fields, index):
        return matrices * hidden * width
    each = fields.integer("moe_intermediate_size") or width
    count = experts * matrices * hidden * each + experts * hidden
    shared = fields.integer("shared_expert_intermediate_size")
    shared = shared or (fields.integer("n_shared_experts") or 0) * each
    return count + matrices * hidden * shared


def _has_experts(fields: Settings, index: int) -> bool:
    if index < (fields.integer("first_k_dense_replace") or 0):
        return False
    if index in (fields.get("mlp_only_layers") or ()):
        return False
    period = fields.integer("expert_layer_period")
    if period:
        return index % period == (fields.integer("expert_layer_offset") or 0)
    return (index + 1) % (fields.integer("decoder_sparse_step") or 1) == 0
