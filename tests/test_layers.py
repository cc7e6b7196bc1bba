"""Slots, layers and the manager: what they hold, when they move it, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from kvgen.cache.layers import CacheStateError, CannotTrimError, Layer
from kvgen.cache.manager import KVCache
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import FULL, SLIDING, LayerSpec

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5


def spec_for(window: int | None) -> LayerSpec:
    return LayerSpec(SLIDING if window else FULL, HEADS, KEY_DIM, VALUE_DIM, window)


def tensors(numbers: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs that carry their number in every element, keys positive and values negative."""
    line = torch.tensor(numbers).view(1, 1, -1, 1)
    keys = line.expand(1, HEADS, -1, KEY_DIM).clone()
    return keys, -line.expand(1, HEADS, -1, VALUE_DIM).clone()


def numbers(*pairs: torch.Tensor) -> list[float]:
    """The numbers back, having checked that every head and dim of both tensors carries them."""
    if not pairs:
        return []
    keys, values = pairs
    found = keys[0, 0, :, 0]
    assert keys.shape[1:2] + keys.shape[3:] == (HEADS, KEY_DIM)
    assert torch.equal(keys, found.view(1, 1, -1, 1).expand_as(keys))
    assert torch.equal(values, -found.view(1, 1, -1, 1).expand_as(values))
    return found.tolist()


@pytest.mark.parametrize("step", [4, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_growing_past_a_step_keeps_every_pair(step: int, offset: int) -> None:
    layer = TokenSlots(None, step)
    expected = [float(i) for i in range(3 * step + offset)]
    for number in expected:
        layer.update(*tensors([number]))
    assert numbers(*layer.views) == expected
    assert layer.capacity % step == 0
    assert layer.capacity - layer.held < step


def test_appending_writes_one_slot_and_moves_nothing_older() -> None:
    layer = TokenSlots(None, 64)
    keys, _ = layer.update(*tensors([float(i) for i in range(10)]))
    address = keys.data_ptr()
    older = [t._version for t in layer.buffers()]
    for i in range(20):
        keys, _ = layer.update(*tensors([100.0 + i]))
        assert keys.data_ptr() == address
    # One in-place write per append and buffer, no other.
    assert [t._version for t in layer.buffers()] == [version + 20 for version in older]


def test_window_keeps_w_minus_one_pairs_between_steps() -> None:
    layer = TokenSlots(8, 4)
    for i in range(30):
        readable, _ = layer.update(*tensors([float(i)]))
        assert readable.shape[2] == min(i + 1, 8)
        assert layer.held == min(i + 1, 7)


def test_a_prompt_longer_than_the_window_is_not_stored_whole() -> None:
    layer = TokenSlots(8, 4)
    readable, _ = layer.update(*tensors([float(i) for i in range(1000)]))
    assert readable.shape[2] == 1000
    assert layer.capacity <= 7 + 4


def test_a_single_slot_of_slack_still_slides() -> None:
    layer = TokenSlots(5, 1)
    for i in range(50):
        readable, values = layer.update(*tensors([float(i)]))
        assert numbers(readable, values) == [float(j) for j in range(max(0, i - 4), i + 1)]


def shown(layer: Layer) -> list[float]:
    assert layer.pairs is not None
    return numbers(*layer.pairs.views)


def caches() -> KVCache:
    cache = KVCache([spec_for(8), spec_for(None)], step=4)
    feed(cache, 5)
    return cache


def feed(cache: KVCache, count: int) -> None:
    new = [float(cache.position + i) for i in range(count)]
    for layer in cache.layers:
        assert layer.pairs is not None
        layer.pairs.update(*tensors(new))
    cache.advance(count)


def test_trim_that_one_layer_refuses_changes_no_layer() -> None:
    cache = caches()
    feed(cache, 5)
    before = [shown(layer) for layer in cache.layers]
    with pytest.raises(CannotTrimError, match="sliding_attention"):
        cache.trim(2)
    assert [shown(layer) for layer in cache.layers] == before
    assert cache.position == 10


def test_trim_takes_the_last_tokens_from_every_layer() -> None:
    cache = caches()
    cache.trim(2)
    assert cache.position == 3
    assert [shown(layer) for layer in cache.layers] == [[0.0, 1.0, 2.0]] * 2


def test_reset_means_length_zero_and_keeps_the_buffers() -> None:
    cache = caches()
    allocated = cache.bytes_allocated
    cache.reset()
    assert (cache.position, cache.bytes_used, cache.bytes_allocated) == (0, 0, allocated)
    feed(cache, 3)
    assert shown(cache.layers[0]) == [0.0, 1.0, 2.0]


def test_fork_shares_no_memory() -> None:
    cache = caches()
    twin = cache.fork()
    feed(twin, 1)
    assert (cache.position, twin.position) == (5, 6)
    ours = {t.untyped_storage().data_ptr() for layer in cache.layers for t in layer.buffers()}
    theirs = {t.untyped_storage().data_ptr() for layer in twin.layers for t in layer.buffers()}
    assert not ours & theirs


def test_used_equals_the_formula_and_allocated_is_every_slot() -> None:
    cache = caches()
    feed(cache, 20)
    assert cache.bytes_used == cache.bytes_formula(itemsize=4)
    per_slot = HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert cache.bytes_allocated == sum(layer.pairs.capacity * per_slot for layer in cache.layers)


def test_a_layer_that_was_left_out_is_found_at_once() -> None:
    cache = caches()
    cache.layers[0].pairs.update(*tensors([9.0]))
    with pytest.raises(CacheStateError, match="has stored 5 tokens where 6"):
        cache.advance(1)
    assert cache.position == 5
