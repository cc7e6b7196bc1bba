"""Writes tiny GGUF files the way llama.cpp does, from a transformers model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny import END, byte_alphabet

GGUF_VOCAB = 258

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_tiny_gguf(path: Path, model: Any, *, leave_out: str = "", pre: str = "") -> None:
    """Write ``model`` as GGUF, without the tensors whose name starts with ``leave_out``.

    The model is a tiny Llama of GGUF_VOCAB tokens: the tiny tokenizer's and one merge, which a
    GGUF tokenizer of this kind must have.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*byte_alphabet(), END, "th"]
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    for name, tensor in model.state_dict().items():
        gguf_name = _gguf_name(name)
        if leave_out and gguf_name.startswith(leave_out):
            continue
        writer.add_tensor(gguf_name, _reordered(gguf_name, tensor.float().numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _reordered(name: str, weights: Any, config: Any) -> Any:
    """GGUF interleaves the two rotary halves of each query and key head; everything else stays."""
    if "attn_q" not in name and "attn_k" not in name:
        return weights
    heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))
