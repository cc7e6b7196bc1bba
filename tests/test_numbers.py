"""Numbers that are none: where generation stops, what it says, and what never reaches a softmax."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from tiny import tiny_llama_config

from kvgen.cache import adapter
from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.engine.decoder import Decoder
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.errors import ModelError


@pytest.fixture
def model() -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config(initializer_range=0.5)).eval()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_step_and_layer_are_named(model: Any, cached: bool, step: int, value: float) -> None:
    cache = KVCache(adapter.specs_for(model)) if cached else None
    decoder = Decoder(Forward(model), [1, 2, 3], Sampler(SamplingOptions()), cache)
    for _ in range(step):
        decoder.step()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = value
    with pytest.raises(ModelError, match=rf"not finite numbers, at step {step}, first in layer 1:"):
        decoder.step()


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (lambda model: model.model.embed_tokens.weight[1].fill_(torch.nan), "the embedding"),
        (lambda model: model.lm_head.weight[7].fill_(torch.inf), "the output layer"),
    ],
)
def test_embedding_and_output_layer_are_told_apart(model: Any, damage: Any, place: str) -> None:
    with torch.no_grad():
        damage(model)
    decoder = Decoder(Forward(model), [1, 2, 3], Sampler(SamplingOptions()), None)
    with pytest.raises(ModelError, match=f"at step 0, first in {place}"):
        decoder.step()


def test_damage_that_only_the_cache_has_is_told_as_such(model: Any) -> None:
    cache = KVCache(adapter.specs_for(model))
    decoder = Decoder(Forward(model), [1, 2, 3], Sampler(SamplingOptions()), cache)
    decoder.step()
    with torch.inference_mode():
        for buffer in cache.layers[0].buffers():
            buffer.fill_(torch.nan)
    with pytest.raises(ModelError, match="at step 1, though not without the cache"):
        decoder.step()


def test_batch_names_the_layer_too(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n', "utf-8")
    done = cli("batch", prompts, "-m", folder, "-q")
    assert done.returncode == 3
    assert "first in layer 1" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """For every row that any attention gets: whether it may look at anything. ``[batch, rows]``."""
    seen: list[torch.Tensor] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Any, key: Any, value: Any, attn_mask: Any = None, **more: Any) -> Any:
        if attn_mask is not None:
            allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1e30
            seen.append(allowed.any(-1).flatten(1))
        else:  # all keys, or all up to its own
            seen.append(torch.ones(query.shape[0], query.shape[2], dtype=torch.bool))
            assert not more.get("is_causal") or query.shape[2] <= key.shape[2]
        return attend(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_no_row_of_a_token_is_masked_whole(
    rows_seen: list[torch.Tensor], window: int | None, chunk: int | None
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    settings = tiny_llama_config().to_dict() | {"sliding_window": window}
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "sliding_window")
    config = MistralConfig(**{name: settings[name] for name in (*keep, *heads)})
    config._attn_implementation = "sdpa"
    model = MistralForCausalLM(config).eval()
    forward, cache = Forward(model), KVCache(adapter.specs_for(model))
    ids = list(range(11))
    forward.extend(ids, TransformersCache(cache), chunk)
    for token in range(6):
        forward.cached([token], TransformersCache(cache))
    forward.uncached(ids)
    assert rows_seen
    assert all(bool(rows.all()) for rows in rows_seen)


def test_in_a_padded_batch_only_padding_may_be_masked_whole(
    model: Any, rows_seen: list[torch.Tensor]
) -> None:
    rows, padding = [[0, 0, 1, 2, 3], [1, 2, 3, 4, 5]], [2, 0]
    cache = TransformersCache(KVCache(adapter.specs_for(model)))
    forward = Forward(model)
    first = forward.rows(rows, padding, cache)
    later = forward.rows([[4], [6]], padding, cache)
    masks = [rows for rows in rows_seen if rows.shape == (2, 5)]
    assert masks
    for mask in masks:
        assert bool(mask[0, 2:].all())
        assert bool(mask[1].all())
    assert bool(first[0, 2:].isfinite().all() and first[1].isfinite().all())
    assert bool(later.isfinite().all())


# What an older or newer transformers may lack


def test_a_model_that_takes_no_cache_names_version_and_supported_range() -> None:
    import transformers

    class Odd:
        def forward(self, input_ids: Any) -> None:
            """Knows no cache."""

    with pytest.raises(ModelError) as caught:
        adapter.cache_argument(Odd())
    assert transformers.__version__ in str(caught.value)
    assert "5.5 or newer" in str(caught.value)


def test_a_transformers_without_its_cache_class_is_named_with_the_supported_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib
    import sys

    import transformers
    import transformers.cache_utils

    monkeypatch.delattr(transformers.cache_utils, "Cache")
    monkeypatch.delitem(sys.modules, "kvgen.cache.adapter")
    with pytest.raises(ModelError) as caught:
        importlib.import_module("kvgen.cache.adapter")
    assert transformers.__version__ in str(caught.value)
    assert "5.5 or newer" in str(caught.value)
