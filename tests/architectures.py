"""The files in ``configs/models/``, and each scaled down by one rule to something that runs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "configs" / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

WINDOW = 8
# Layer counts become the least that shows every kind of layer, widths a 64th, experts a few.
_LAYERS = ("num_hidden_layers", "n_layer")
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "n_embd", "head_dim")
_WIDTHS += ("shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim")
_WIDTHS += ("qk_nope_head_dim", "qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim")
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "linear_num_key_heads")
_HEADS += ("linear_num_value_heads", "num_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
    "mamba_dt_rank": 4,
    "query_pre_attn_scalar": 16,
    "state_size": 8,
    "mamba_d_state": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def raw(name: str) -> dict[str, Any]:
    """The content of an architecture file."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return content


def config_of(fields: dict[str, Any]) -> Any:
    """The decoder's configuration object that transformers makes of a ``config.json``."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields), "utf-8")
        return AutoConfig.from_pretrained(folder).get_text_config(decoder=True)


def scaled_down(name: str) -> dict[str, Any]:
    """The same architecture with fewer and narrower layers; what is no size stays."""
    return _scaled(raw(name))


def _scaled(fields: dict[str, Any]) -> dict[str, Any]:
    small = {}
    heads = fields.get("num_attention_heads") or fields.get("n_head") or fields.get("num_heads")
    for key, value in fields.items():
        if isinstance(value, dict) and key == "text_config":
            small[key] = _scaled(value)
        elif value is None or isinstance(value, bool):
            small[key] = value
        elif key in _LAYERS:
            small[key] = min(value, 8)
        elif key in _WIDTHS:
            small[key] = 16 if "dim" in key or "rank" in key else 64
        elif key in _HEADS:
            # The ratio of query heads to key/value heads stays as far as four heads allow.
            small[key] = 4 if value == heads or ("value" in key and "linear" in key) else 2
        elif key in _EXPERTS:
            small[key] = 4
        elif key in _TOKEN_IDS:
            small[key] = 0
        elif key == "layer_types":
            small[key] = value[:8]
        else:
            small[key] = _SMALL.get(key, value)
    if fields.get("model_type") == "mamba2":
        small |= {"num_heads": 8, "head_dim": 16}
    if fields.get("text_config"):
        small["text_config"] |= {"vocab_size": 128}
    return small


def small_model(name: str) -> Any:
    """The scaled-down model with random weights, float32, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(scaled_down(name)), dtype=torch.float32)
    return model.eval()
