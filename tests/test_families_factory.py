"""The toys of `families` are what the matrix needs: tiny, repeatable and never stuck on a token."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, OVERRIDES, UNUSABLE, VOCAB, causal_lm_types, tiny_config, tiny_model

SAMPLE = ("llama", "gpt2", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2", "bert", "opt")


def greedy(model_type: str, new_tokens: int = 12) -> list[list[int]]:
    """Greedy continuations of four random prompts, without a cache."""
    model = tiny_model(model_type)
    ids = torch.randint(5, VOCAB - 8, (4, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(new_tokens):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=-1)
    return ids[:, 6:].tolist()


def test_every_causal_lm_type_is_listed() -> None:
    assert list(FAMILIES) == causal_lm_types()
    assert len(FAMILIES) > 100
    assert not set(OVERRIDES) & set(UNUSABLE)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_toys_are_small_and_repeatable(model_type: str) -> None:
    first, second, other = (tiny_model(model_type, seed) for seed in (0, 0, 1))
    assert sum(weight.numel() for weight in first.parameters()) < 1_000_000
    assert not first.training
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(left, right) and left.dtype == torch.float32 for left, right in pairs)
    changed = zip(first.parameters(), other.parameters(), strict=True)
    assert all(not torch.equal(left, right) for left, right in changed)


@pytest.mark.parametrize("model_type", SAMPLE)
@torch.no_grad()
def test_greedy_text_varies(model_type: str) -> None:
    distinct = [len(set(tokens)) for tokens in greedy(model_type)]
    assert sum(distinct) >= 4 * 4, distinct


@pytest.mark.newest
def test_every_layer_kind_of_a_mixed_type_occurs() -> None:
    assert set(tiny_config("gemma3_text").layer_types) == {"sliding_attention", "full_attention"}
    assert set(tiny_config("lfm3").layer_types) == {
        "conv",
        "full_attention",
        "sliding_attention",
    }


def test_overrides_win() -> None:
    assert tiny_config("llama", num_hidden_layers=5).num_hidden_layers == 5
