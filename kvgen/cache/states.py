"""What recurrent and convolution layers keep: one rule per family of layers.

Imports neither torch nor transformers. States have no token axis, so they do not grow. A
convolution state holds the last ``kernel`` inputs of each channel in the model's dtype; recurrent
states are kept in float32 unless a rule says otherwise. Where a model names no rule, ``None``
says that the shapes are known from the first token only.
"""

from __future__ import annotations

from kvgen.cache.settings import Settings
from kvgen.cache.spec import CONV, HYBRID_SLIDING, StateSpec

States = tuple[StateSpec, ...]
_FLOAT32, _INT64 = 4, 8


def states_of(layer: Settings, kind: str, index: int) -> States | None:
    """The states of layer ``index``, or ``None`` where no rule is known."""
    model_type = str(layer.get("model_type"))
    if model_type.startswith("inkling"):
        return _short_convolutions(layer, kind)
    if model_type == "zaya":
        return _compressed_convolution(layer)
    if kind == CONV:
        return (StateSpec((layer.count("hidden_size"), layer.count("conv_L_cache"))),)
    if model_type in _MAMBA_2:
        return _mamba_2(layer, *_MAMBA_2[model_type])
    if model_type == "recurrent_gemma":
        return _linear_recurrence(layer)
    if model_type in _MAMBA_1:
        return _mamba_1(layer)
    if layer.get("linear_num_value_heads") is not None:
        return _gated_delta(layer) + _per_layer_embedding(layer, index)
    if layer.get("linear_num_heads") is not None:
        return _kimi_delta(layer)
    return None


_MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "zamba")


def _mamba_1(layer: Settings) -> States:
    """Gu and Dao, 2023: a state of ``state_size`` numbers for each inner channel."""
    inner = layer.integer("mamba_expand", "expand") or 2
    inner *= layer.count("hidden_size")
    kernel = layer.count("mamba_d_conv", "conv_kernel")
    state = layer.count("mamba_d_state", "state_size")
    heads = layer.integer("n_mamba_heads")
    shape = (inner, state) if heads is None else (heads, inner // heads, state)
    return StateSpec((inner, kernel)), StateSpec(shape, _FLOAT32)


# Names of: heads, dim of a head, dim of the state, groups, kernel.
_BAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_MAMBA_2 = {
    "mamba2": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
    "bamba": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "falcon_h1": _BAMBA,
    "nemotron_h": (
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups",
        "conv_kernel",
    ),
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
}


def _mamba_2(layer: Settings, heads: str, dim: str, state: str, groups: str, kernel: str) -> States:
    """Dao and Gu, 2024: inner channels share states in groups; both pass the convolution."""
    count, width, numbers = layer.count(heads), layer.count(dim), layer.count(state)
    channels = count * width + 2 * layer.count(groups) * numbers
    convolution = StateSpec((channels, layer.count(kernel)))
    return convolution, StateSpec((count, width, numbers), _FLOAT32)


def _gated_delta(layer: Settings) -> States:
    """Yang et al., 2024, gated delta networks: one key-by-value matrix for each value head."""
    keys, key_dim = layer.count("linear_num_key_heads"), layer.count("linear_key_head_dim")
    values = layer.count("linear_num_value_heads")
    value_dim = layer.count("linear_value_head_dim")
    channels = 2 * keys * key_dim + values * value_dim
    convolution = StateSpec((channels, layer.count("linear_conv_kernel_dim")))
    return convolution, StateSpec((values, key_dim, value_dim), _FLOAT32)


def _linear_recurrence(layer: Settings) -> States:
    """De et al., 2024, Griffin: one number per channel; the convolution keeps past inputs only."""
    width = layer.integer("lru_width") or layer.count("hidden_size")
    convolution = StateSpec((width, layer.count("conv1d_width") - 1))
    return convolution, StateSpec((width,), _FLOAT32)


def _kimi_delta(layer: Settings) -> States:
    heads, dim = layer.count("linear_num_heads"), layer.count("linear_head_dim")
    convolution = StateSpec((3 * heads * dim, layer.count("linear_conv_kernel_dim")))
    return convolution, StateSpec((heads, dim, dim), _FLOAT32)


def _per_layer_embedding(layer: Settings, index: int) -> States:
    """qwen4_exp: some layers also convolve over embeddings of the last few token ids."""
    if index + 1 not in (layer.get("ple_layer_ids") or ()):
        return ()
    grams = layer.count("ngram_size")
    reach = (layer.count("ple_conv_kernel_size") - 1) * grams
    channels = layer.count("hc_count") * layer.count("hidden_size")
    return StateSpec((channels, reach)), StateSpec((grams - 1,), _INT64)


def _short_convolutions(layer: Settings, kind: str) -> States:
    """inkling: keys, values and both residual branches each pass a short convolution."""
    own = "swa_" if kind == HYBRID_SLIDING else ""
    pairs = layer.count(f"{own}num_key_value_heads") * layer.count(f"{own}head_dim")
    kernel, hidden = layer.count("conv_kernel_size"), layer.count("hidden_size")
    return tuple(StateSpec((channels, kernel)) for channels in (pairs, pairs, hidden, hidden))


def _compressed_convolution(layer: Settings) -> States:
    """zaya: queries and keys pass two convolutions; the last values are kept beside them."""
    heads, kv_heads = layer.count("num_attention_heads"), layer.count("num_key_value_heads")
    dim = layer.count("head_dim")
    reach = layer.count("cca_time0") + layer.count("cca_time1") - 2
    channels = (heads + kv_heads) * dim
    return StateSpec((channels, reach)), StateSpec((kv_heads * dim // 2,))
