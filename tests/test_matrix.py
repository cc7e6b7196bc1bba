"""Every causal-LM type against its own uncached forward, one tiny random model each.

What is proven here is what ``docs/models.md`` lists; the count is printed at the end of the run.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, WINDOW, tiny_model

from kvgen.cache.adapter import TransformersCache, continues_prefill, specs_for
from kvgen.cache.layers import CannotTrimError, Layer
from kvgen.cache.manager import KVCache
from kvgen.cache.quirks import counts_own_positions, refusal
from kvgen.cache.spec import WINDOWED
from kvgen.engine.decoder import Decoder
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.errors import ModelError
from kvgen.measure.verify import Verifier

LENGTH = 3 * WINDOW + 6
PROMPT = 4
SERVED = [name for name, family in FAMILIES.items() if family.usable and not refusal(name)]

pytestmark = pytest.mark.newest


def ids(seed: int = 1, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(3, 120), k=length)


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", SERVED)
def test_a_type_is_served_exactly(model_type: str) -> None:
    torch.set_num_threads(1)
    model = tiny_model(model_type)
    limit = FAMILIES[model_type].tolerance
    assert counts_own_positions(model) == FAMILIES[model_type].own_positions

    for outcome in Verifier(model, ids(), PROMPT, limit, step=16).outcomes():
        assert outcome.status != "fail", (model_type, outcome)

    # Greedy text, step by step, from a prompt that already passes the window.
    forward, sampler = Forward(model), Sampler(SamplingOptions())
    cache = KVCache(specs_for(model), step=16)
    cached = Decoder(forward, ids(2, 11), sampler, cache)
    uncached = Decoder(forward, ids(2, 11), sampler, None)
    for _ in range(12):
        ours, theirs = cached.step(), uncached.step()
        assert (ours.logits - theirs.logits).abs().max() <= limit
        if ours.id != theirs.id:  # only a tie within the tolerance may fall either way
            first, second = theirs.logits.topk(2).values.tolist()
            assert first - second <= 2 * limit
            break
    check_storage(cache)


def check_storage(cache: KVCache) -> None:
    """Nothing but kvgen's own objects holds tensors, and bounded kinds are bounded."""
    own = {type(part).__module__ for layer in cache.layers for part in layer.parts}
    assert all(module.startswith("kvgen.cache.") for module in own)
    assert all(type(layer) is Layer for layer in cache.layers)
    for layer in cache.layers:
        if layer.spec.kind in WINDOWED and layer.pairs is not None:
            assert layer.pairs.held == min(cache.position, WINDOW - 1)
            assert layer.pairs.capacity <= WINDOW - 1 + 16


def test_the_list_in_the_documentation_is_the_one_proven_here() -> None:
    script = Path(__file__).parent.parent / "scripts" / "describe-models"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, timeout=120)
    assert done.returncode == 0, "run scripts/describe-models"


def test_at_least_sixty_types_are_proven() -> None:
    assert len(SERVED) >= 60


def test_every_layer_kind_is_proven_by_at_least_one_type() -> None:
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

    proven = {spec.kind for name in SERVED for spec in specs_for(tiny_model(name))}
    assert proven >= set(DYNAMIC_LAYER_TYPE_MAPPING) - {"reference_sliding_attention"}


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "lfm2"])
def test_recurrent_states_stay_constant_and_refuse_to_be_trimmed(model_type: str) -> None:
    model = tiny_model(model_type)
    cache = KVCache(specs_for(model))
    forward, adapter = Forward(model), TransformersCache(cache)
    forward.cached(ids()[:5], adapter)
    recurrent = [layer for layer in cache.layers if layer.states is not None]
    before = [layer.bytes_used for layer in recurrent]
    for token in ids()[5:20]:
        forward.cached([token], adapter)
    assert [layer.bytes_used for layer in recurrent] == before
    held = [tensor.clone() for tensor in stored(cache)]
    with pytest.raises(CannotTrimError):
        cache.trim(1)
    assert cache.position == 20
    assert all(torch.equal(a, b) for a, b in zip(held, stored(cache), strict=True))


def stored(cache: KVCache) -> list[torch.Tensor]:
    """What the layers hold, without the unused ends of their buffers."""
    pairs = [view for layer in cache.layers if layer.pairs for view in layer.pairs.views]
    return pairs + [state for la in cache.layers if la.states for state in la.states.buffers()]


def test_a_wrapped_window_refuses_to_be_trimmed_and_changes_nothing() -> None:
    model = tiny_model("gemma3_text")
    cache = KVCache(specs_for(model))
    Forward(model).cached(ids()[: WINDOW + 2], TransformersCache(cache))
    with pytest.raises(CannotTrimError, match="sliding_attention"):
        cache.trim(1)
    assert {layer.pairs.length for layer in cache.layers if layer.pairs} == {WINDOW + 2}


@pytest.mark.parametrize("model_type", ["minimax", "openai-gpt", "rwkv"])
def test_a_type_that_cannot_be_served_is_refused_by_name(model_type: str) -> None:
    from families import tiny_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    with pytest.raises(ModelError, match=rf"{model_type}.*--no-cache"):
        specs_for(model)


def test_states_that_a_model_keeps_itself_belong_to_one_cache_each() -> None:
    model = tiny_model("recurrent_gemma")
    forward, first, second = (
        Forward(model),
        *(TransformersCache(KVCache(specs_for(model))) for _ in range(2)),
    )
    expected = [forward.uncached(ids(seed)[:7]) for seed in (1, 2)]
    for seed, cache in ((1, first), (2, second)):
        forward.cached(ids(seed)[:6], cache)
    found = [forward.cached([ids(1)[6]], first), forward.cached([ids(2)[6]], second)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def test_a_model_that_ignores_its_cache_is_found_at_the_first_forward() -> None:
    model = tiny_model("llama")
    forward = model.model.forward
    model.model.forward = lambda *args, cache=None, **rest: forward(*args, **rest)
    cache = KVCache(specs_for(model))
    with pytest.raises(ModelError, match="does not use the cache"):
        Forward(model).cached([5, 6, 7], TransformersCache(cache))


def test_models_that_start_over_on_a_second_prefill_are_known() -> None:
    """The types listed are those whose chunked prefill differs, and no others."""
    for model_type in ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma", "mamba2"):
        model = tiny_model(model_type)
        forward = Forward(model)
        cache = TransformersCache(KVCache(specs_for(model)))
        forward.cached(ids()[:5], cache)
        again = forward.cached(ids()[5:9], cache)
        differs = bool((again - forward.uncached(ids()[:9])).abs().max() > 1e-3)
        assert differs != continues_prefill(model, specs_for(model)), model_type


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "mamba2", "zaya"])
def test_states_of_16_bit_models_follow_the_formula_too(model_type: str) -> None:
    model: Any = tiny_model(model_type).to(torch.bfloat16)
    cache = KVCache(specs_for(model))
    Forward(model).cached(ids()[:9], TransformersCache(cache))
    assert cache.bytes_used == cache.bytes_formula(itemsize=2)
