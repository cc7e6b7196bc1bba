"""Decoding with kvgen's cache gives the ids and logits of the model's own uncached argmax loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from families import VOCAB, WINDOW, tiny_model
from oracle import Greedy, decoder, full_logits, largest_difference, new_cache, steps
from oracle import uncached_greedy as uncached

from kvgen.cache.layers import CannotTrimError
from kvgen.engine.forward import Forward
from kvgen.models import LoadedModel

TYPES = ("gpt2", "llama", "mistral", "gemma3_text", "qwen3", "phi")
WINDOWED = ("mistral", "gemma3_text", "qwen3")
GROWTH = 16  # slots that a buffer grows by in these tests
WINDOW_EDGES = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1)
GROWTH_EDGES = (GROWTH - 1, GROWTH, GROWTH + 1)
CHUNKS = (None, 1, 3, 7)
NEW = 2 * GROWTH + 2  # far enough for every prompt to pass a window and two growths
FLOAT32 = 1e-4


@cache
def model_of(model_type: str) -> Any:
    return tiny_model(model_type)


def prompt_of(tokens: int) -> list[int]:
    draw = torch.Generator().manual_seed(tokens)
    return torch.randint(5, VOCAB - 8, (tokens,), generator=draw).tolist()


@cache
def expected(model_type: str, tokens: int, new_tokens: int = NEW) -> Greedy:
    return uncached(model_of(model_type), prompt_of(tokens), new_tokens)


def assert_same(found: Greedy, wanted: Greedy) -> None:
    assert found.ids == wanted.ids
    assert largest_difference(found.logits, wanted.logits) < FLOAT32


def test_the_toys_have_the_windows_that_are_to_be_passed() -> None:
    for model_type in TYPES:
        windows = {layer.window for layer in new_cache(model_of(model_type)).specs}
        assert (WINDOW in windows) == (model_type in WINDOWED), model_type


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda c: f"chunk-{c}")
@pytest.mark.parametrize("tokens", [1, *WINDOW_EDGES, *GROWTH_EDGES])
@pytest.mark.parametrize("model_type", TYPES)
def test_cached_greedy_decoding_equals_the_uncached_loop(
    model_type: str, tokens: int, chunk: int | None
) -> None:
    model = model_of(model_type)
    kv = new_cache(model, GROWTH)
    assert_same(
        steps(decoder(model, prompt_of(tokens), kv, chunk), NEW), expected(model_type, tokens)
    )
    # The newest token is chosen but not forwarded yet.
    assert kv.position == tokens + NEW - 1


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda c: f"chunk-{c}")
@pytest.mark.parametrize("model_type", TYPES)
def test_used_bytes_equal_the_formula_after_every_step(model_type: str, chunk: int | None) -> None:
    model = model_of(model_type)
    kv = new_cache(model, GROWTH)
    running = decoder(model, prompt_of(WINDOW - 2), kv, chunk)
    for _ in range(NEW):
        running.step()
        assert kv.bytes_used == kv.bytes_formula(itemsize=4)
        assert kv.bytes_allocated >= kv.bytes_used


@pytest.mark.parametrize(
    ("model_type", "pair_bytes", "full_layers", "window_layers"),
    [
        # 4 bytes x (keys + values) x heads x head_dim
        ("gpt2", 4 * 2 * 4 * 16, 3, 0),
        ("llama", 4 * 2 * 2 * 8, 3, 0),
        ("mistral", 4 * 2 * 2 * 8, 0, 3),
        ("gemma3_text", 4 * 2 * 2 * 8, 1, 5),
        ("qwen3", 4 * 2 * 2 * 8, 1, 2),
        ("phi", 4 * 2 * 2 * 16, 3, 0),
    ],
)
def test_the_bytes_are_those_worked_out_by_hand(
    model_type: str, pair_bytes: int, full_layers: int, window_layers: int
) -> None:
    model = model_of(model_type)
    kv = new_cache(model, GROWTH)
    running = decoder(model, prompt_of(WINDOW - 3), kv)
    for held in range(WINDOW - 3, 2 * WINDOW):
        running.step()
        in_window = min(held, WINDOW - 1)
        assert kv.bytes_used == pair_bytes * (full_layers * held + window_layers * in_window)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_growth_step_keeps_allocation_within_a_step_of_use(model_type: str) -> None:
    model = model_of(model_type)
    kv = new_cache(model, GROWTH)
    running = decoder(model, prompt_of(3), kv)
    for _ in range(NEW):
        running.step()
    slack = sum(spec.elements_per_token * 4 * GROWTH for spec in kv.specs)
    assert kv.bytes_allocated - kv.bytes_used <= slack


@pytest.mark.parametrize("take_back", [1, 2, WINDOW, GROWTH + 1])
@pytest.mark.parametrize("model_type", [t for t in TYPES if t not in WINDOWED])
def test_after_a_trim_the_same_text_comes_again(model_type: str, take_back: int) -> None:
    model, tokens = model_of(model_type), WINDOW + 1
    kv = new_cache(model, GROWTH)
    first = steps(decoder(model, prompt_of(tokens), kv), NEW)
    kv.trim(take_back)
    assert kv.position == tokens + NEW - 1 - take_back
    assert kv.bytes_used == kv.bytes_formula(itemsize=4)
    # The ids up to the newest that the cache still holds are the new prompt, plus one pending.
    kept = (prompt_of(tokens) + first.ids)[: kv.position + 1]
    again = steps(decoder(model, kept, kv), take_back)
    assert_same(again, Greedy(first.ids[-take_back:], first.logits[-take_back:]))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_trim_followed_by_another_text_equals_that_text_from_nothing(model_type: str) -> None:
    model, tokens = model_of(model_type), WINDOW - 2
    kv = new_cache(model, GROWTH)
    decoder(model, prompt_of(tokens), kv).step()
    kv.trim(3)
    other = prompt_of(tokens)[: tokens - 3] + prompt_of(40)
    assert_same(steps(decoder(model, other, kv, 3), 5), uncached(model, other, 5))


@pytest.mark.parametrize("model_type", WINDOWED)
def test_a_passed_window_refuses_a_trim_and_goes_on_unharmed(model_type: str) -> None:
    model, tokens = model_of(model_type), WINDOW + 1
    kv = new_cache(model, GROWTH)
    running = decoder(model, prompt_of(tokens), kv)
    start = steps(running, 4)
    with pytest.raises(CannotTrimError):
        kv.trim(1)
    rest = steps(running, NEW - 4)
    assert_same(
        Greedy(start.ids + rest.ids, torch.cat((start.logits, rest.logits))),
        expected(model_type, tokens),
    )


@pytest.mark.parametrize("tokens", [WINDOW - 1, 2 * WINDOW + 1])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_fork_and_its_origin_go_on_without_each_other(model_type: str, tokens: int) -> None:
    model = model_of(model_type)
    prompt = prompt_of(tokens)
    kv = new_cache(model, GROWTH)
    start = steps(decoder(model, prompt, kv), 3)
    twin = kv.fork()
    # Turn about, on different texts, so that shared memory would show.
    other = prompt + start.ids[:2] + prompt_of(12)
    ours, theirs = decoder(model, prompt + start.ids, kv), decoder(model, other, twin, 5)
    pairs = [(steps(ours, 1), steps(theirs, 1)) for _ in range(GROWTH)]
    wanted = expected(model_type, tokens)
    assert start.ids + [left.ids[0] for left, _ in pairs] == wanted.ids[: 3 + GROWTH]
    ours_logits = torch.cat([left.logits for left, _ in pairs])
    assert largest_difference(ours_logits, wanted.logits[3 : 3 + GROWTH]) < FLOAT32
    forked = Greedy([r.ids[0] for _, r in pairs], torch.cat([r.logits for _, r in pairs]))
    assert_same(forked, uncached(model, other, GROWTH))
    assert twin.bytes_used == twin.bytes_formula(itemsize=4)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_reset_cache_is_as_good_as_a_new_one(model_type: str) -> None:
    model = model_of(model_type)
    kv = new_cache(model, GROWTH)
    steps(decoder(model, prompt_of(30), kv), 5)
    kv.reset()
    assert (kv.position, kv.bytes_used) == (0, 0)
    found = steps(decoder(model, prompt_of(WINDOW + 1), kv, 3), NEW)
    assert_same(found, expected(model_type, WINDOW + 1))


@pytest.mark.parametrize("model_type", TYPES)
def test_one_parallel_forward_gives_the_logits_of_token_by_token_decoding(model_type: str) -> None:
    """Why training needs no cache: one masked forward covers every known position."""
    model, ids = model_of(model_type), prompt_of(3 * WINDOW)
    kv = new_cache(model, GROWTH)
    rows = []
    for end in range(1, len(ids) + 1):
        rows.append(steps(decoder(model, ids[:end], kv), 1).logits[0])
    assert largest_difference(torch.stack(rows), full_logits(model, ids)) < FLOAT32


@pytest.mark.parametrize("model_type", TYPES)
def test_stored_pairs_stay_bit_for_bit_when_a_token_is_appended(model_type: str) -> None:
    model = model_of(model_type)
    kv = new_cache(model, GROWTH)
    running = decoder(model, prompt_of(5), kv)
    running.step()
    for _ in range(2 * GROWTH):
        before = [[view.clone() for view in layer.pairs.views] for layer in kv.layers]
        running.step()
        for layer, views in zip(kv.layers, before, strict=True):
            stay = layer.pairs.held - 1
            for now, then in zip(layer.pairs.views, views, strict=True):
                assert torch.equal(now[:, :, :stay], then[:, :, then.shape[2] - stay :])


@pytest.mark.parametrize("model_type", TYPES)
def test_the_last_positions_logits_alone_are_computed(model_type: str) -> None:
    model = model_of(model_type)
    assert Forward(model).uncached(prompt_of(9)).shape == (VOCAB,)
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.shape[1])
    )
    try:
        steps(decoder(model, prompt_of(9), new_cache(model)), 2)
    finally:
        hook.remove()
    assert seen == [1, 1]


@pytest.mark.parametrize("model_type", TYPES)
def test_a_lost_pair_would_be_seen(model_type: str) -> None:
    """The comparison can fail: a cache that forgets its first pair gives other logits."""
    model, tokens = model_of(model_type), WINDOW - 2
    kv = new_cache(model, GROWTH)
    running = decoder(model, prompt_of(tokens), kv)
    running.step()
    with torch.inference_mode():
        for layer in kv.layers:
            layer.pairs.views[1][:, :, 0] = 0
    found = steps(running, 1)
    wanted = expected(model_type, tokens).logits[1:2]
    assert largest_difference(found.logits, wanted) > 10 * FLOAT32


# The real model.

LONG = "The quick brown fox jumps over the lazy dog, and the rain in Spain stays mainly. " * 60
PROMPTS = {
    "plain": "Time flies",
    "one token": "The",
    "over 1,000 tokens": LONG,
    "not latin, emoji": "Привет, мир! 日本語の文章です。 مرحبا 👩‍👩‍👧🏳️‍🌈",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    ",
    "blank lines": "Dear all,\n\n\n\tI am writing  to   you\r\n\r\n",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34, ",
}


@pytest.mark.real
@pytest.mark.parametrize("name", PROMPTS)
def test_the_real_model_gives_its_own_uncached_text(name: str, smollm: LoadedModel) -> None:
    prompt = smollm.tokenizer(PROMPTS[name])["input_ids"]
    assert (len(prompt) > 1000) == (name == "over 1,000 tokens")
    kv = new_cache(smollm.model, 256)
    new = 4 if name == "over 1,000 tokens" else 24
    assert_same(steps(decoder(smollm.model, prompt, kv), new), uncached(smollm.model, prompt, new))
    # 30 layers x 3 heads x (64 + 64) numbers x 4 bytes
    assert kv.bytes_used == kv.bytes_formula(itemsize=4) == 46_080 * (len(prompt) + new - 1)


@pytest.mark.real
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_the_real_model_takes_its_prompt_in_chunks(chunk: int, smollm: LoadedModel) -> None:
    prompt = smollm.tokenizer(PROMPTS["not latin, emoji"])["input_ids"]
    kv = new_cache(smollm.model)
    found = steps(decoder(smollm.model, prompt, kv, chunk), 6)
    assert_same(found, uncached(smollm.model, prompt, 6))
