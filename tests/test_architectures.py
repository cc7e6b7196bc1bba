"""Every architecture file: its bytes worked out by hand, and predicted against real tensors."""

from __future__ import annotations

import pytest
import torch
from architectures import NAMES, WINDOW, config_of, raw, scaled_down, small_model

from kvgen.cache.adapter import TransformersCache, specs_for
from kvgen.cache.manager import KVCache
from kvgen.cache.policies import POLICIES, find_policy
from kvgen.cache.shapes import specs_from_config
from kvgen.cache.spec import total_bytes
from kvgen.engine.forward import Forward
from kvgen.errors import ModelError

LATENT = "deepseek-v3"


def grown(name: str, tokens: int, itemsize: int = 2) -> int:
    """Bytes that one more token adds after ``tokens``."""
    specs = specs_from_config(raw(name))
    before, after = (total_bytes(specs, n, itemsize) for n in (tokens, tokens + 1))
    assert before is not None
    assert after is not None
    return after - before


BY_HAND = {
    # name: (bytes per token in 16 bits before any window is full, and after)
    # 2 (keys and values) x 12 layers x 12 heads x 64 numbers (768 / 12) x 2 bytes
    "gpt2": (36_864, 36_864),
    # 2 x 30 layers x 3 KV heads x 64 (576 / 9) x 2
    "smollm2-135m": (23_040, 23_040),
    # 2 x 32 x 8 x 128 (4,096 / 32) x 2
    "llama-3.1-8b": (131_072, 131_072),
    # 2 x 80 x 8 x 128 (8,192 / 64) x 2
    "llama-3.1-70b": (327_680, 327_680),
    # 2 x 28 x 8 x 128 (head_dim; 1,024 / 16 would be 64) x 2
    "qwen3-0.6b": (114_688, 114_688),
    # 2 x 36 x 8 x 128 x 2
    "qwen3-8b": (147_456, 147_456),
    # 2 x 48 x 4 x 128 (head_dim; 2,048 / 32 would be 64) x 2; experts keep nothing
    "qwen3-30b-a3b": (98_304, 98_304),
    # 2 x 32 x 8 x 128 x 2; every layer slides
    "mistral-7b-v0.1": (131_072, 0),
    # 62 layers, every sixth full: 10 full and 52 sliding. 2 x 16 x 128 x 2 = 8,192 each
    "gemma-3-27b": (62 * 8_192, 10 * 8_192),
    # 24 layers, half sliding: 2 x 8 x 64 x 2 = 2,048 each
    "gpt-oss-20b": (24 * 2_048, 12 * 2_048),
    # 2 x 40 x 10 x 128 (5,120 / 40) x 2
    "phi-4": (204_800, 204_800),
    # 61 layers x (512 latent numbers + 64 of the rotary key) x 2; heads do not count
    "deepseek-v3": (70_272, 70_272),
    # 48 layers, every fourth full: 12 x 2 x 2 KV heads x 256 x 2
    "qwen3-next-80b-a3b": (24_576, 24_576),
    # 32 layers, one in eight attends: 4 x 2 x 8 x 128 (4,096 / 32) x 2
    "jamba-1.5-mini": (16_384, 16_384),
    # no attention
    "mamba2-780m": (0, 0),
}

STATES = {
    # 36 linear layers: a convolution over 2 x 16 x 128 + 32 x 128 = 8,192 channels, 4 inputs each,
    # in 16 bits; 32 x 128 x 128 recurrent numbers in float32: 65,536 + 2,097,152 bytes
    "qwen3-next-80b-a3b": 36 * (65_536 + 2_097_152),
    # 28 Mamba layers of 8,192 channels: 4 inputs in 16 bits, 16 numbers in float32
    "jamba-1.5-mini": 28 * (8_192 * 4 * 2 + 8_192 * 16 * 4),
    # 48 layers: 3,072 + 2 x 128 = 3,328 channels x 4 x 2; 48 heads x 64 x 128 in float32
    "mamba2-780m": 48 * (3_328 * 4 * 2 + 48 * 64 * 128 * 4),
}


def test_every_file_is_worked_out_by_hand() -> None:
    assert sorted(BY_HAND) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_bytes_per_token_are_those_worked_out_by_hand(name: str) -> None:
    early, late = BY_HAND[name]
    assert grown(name, 1) == early
    assert grown(name, 100_000) == late
    fixed = total_bytes(specs_from_config(raw(name)), 1, 2)
    assert fixed == early + STATES.get(name, 0)


def test_the_known_totals() -> None:
    # 147,456 x 32,768 = 4.5 x 2**30
    assert total_bytes(specs_from_config(raw("qwen3-8b")), 32_768, 2) == 4.5 * 2**30
    # float32: 2 x 12 x 12 x 64 x 4
    assert total_bytes(specs_from_config(raw("gpt2")), 1, 4) == 73_728
    # DeepSeek-V3 with the keys and values made from the latent:
    # 61 x 128 heads x (128 + 64 + 128) x 2
    expanded = specs_from_config(raw(LATENT), expand_latent=True)
    assert total_bytes(expanded, 1, 2) == 4_997_120
    # Mistral keeps 4,095 pairs: 131,072 x 4,095
    mistral = specs_from_config(raw("mistral-7b-v0.1"))
    assert total_bytes(mistral, 4_095, 2) == total_bytes(mistral, 10**6, 2) == 536_739_840


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["full size", "scaled down"])
def test_a_file_says_what_transformers_makes_of_it(name: str, scale: str) -> None:
    fields = raw(name) if scale == "full size" else scaled_down(name)
    assert specs_from_config(fields) == specs_from_config(config_of(fields))


POLICY_OPTIONS = {"window": "window:5,sink:2", "int8": "int8,recent:2", "int4": "int4,group:8"}


# Mamba's own code asks older releases' caches for something else.
NEWEST = ("jamba-1.5-mini", "mamba2-780m")
MARKED = [pytest.param(n, marks=pytest.mark.newest) if n in NEWEST else n for n in NAMES]


@pytest.mark.parametrize("name", MARKED)
def test_predicted_bytes_are_those_of_real_tensors(name: str) -> None:
    """For every policy, at the lengths around the window, stepwise and in one piece."""
    torch.set_num_threads(1)
    model = small_model(name)
    expanded = specs_for(model) != specs_from_config(scaled_down(name))
    specs = specs_from_config(scaled_down(name), expand_latent=expanded)
    assert specs == specs_for(model)
    forward = Forward(model)
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
    for known in POLICIES:
        policy = find_policy(POLICY_OPTIONS.get(known, known)).for_tokens(3 * WINDOW)
        stepwise = KVCache(specs, policy=policy)
        adapter = TransformersCache(stepwise)
        for length in range(1, 3 * WINDOW + 1):
            forward.cached([length], adapter)
            if length not in lengths:
                continue
            whole = KVCache(specs, policy=policy)
            forward.cached(list(range(1, length + 1)), TransformersCache(whole))
            for cache in (stepwise, whole):
                predicted = total_bytes(specs, length, 4, policy=policy)
                assert cache.bytes_used == predicted, (known, length)
                assert cache.bytes_allocated == real_bytes(cache)


def real_bytes(cache: KVCache) -> int:
    """Of all storage, counted without the cache's help."""
    storages = {}
    for layer in cache.layers:
        for buffer in layer.buffers():
            storage = buffer.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"model_type": None}, "model_type"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be a whole number, not 'many'"),
        ({"layer_types": ["full_attention"]}, "1 layer types for 36 layers"),
        ({"layer_types": ["spiral"] * 36}, "'spiral'"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": None},
            "max_window",
        ),
        ({"model_type": "exaone4"}, "layer_types"),
        ({"model_type": "gemma4_text"}, "cannot size it from the file"),
    ],
)
def test_a_broken_configuration_is_refused_by_the_name_of_the_field(
    change: dict[str, object], message: str
) -> None:
    fields = {key: value for key, value in (raw("qwen3-8b") | change).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        specs_from_config(fields)
