"""A stored prefix serves again, as far as it can, and says why not further."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.cache.manager import KVCache
from kvgen.cache.prefix_index import PrefixIndex
from kvgen.cache.reuse import ONE_TOKEN, take_up
from kvgen.cache.spec import FULL, SLIDING, LayerSpec
from kvgen.cache.trie import common_prefix

WINDOW = 8


def holding(ids: list[int], window: int | None = None) -> KVCache:
    """A cache of one full-attention layer, or a sliding one too, whose pairs are the ids."""
    specs = [LayerSpec(FULL, 1, 2, 2)]
    if window:
        specs.append(LayerSpec(SLIDING, 1, 2, 2, window))
    cache = KVCache(specs, step=4)
    for token in ids:
        pair = torch.full((1, 1, 1, 2), float(token))
        for layer in cache.layers:
            layer.pairs.update(pair, pair)
        cache.advance(1)
    return cache


def held(cache: KVCache) -> list[int]:
    """The ids whose pairs the first layer holds."""
    return cache.layers[0].pairs.views[0][0, 0, :, 0].int().tolist()


@pytest.mark.parametrize("matched", [1, WINDOW - 1, WINDOW, WINDOW + 1, 19, 20])
def test_the_longest_common_prefix_serves(matched: int) -> None:
    stored = list(range(20))
    prompt = [*stored[:matched], 99, 98]
    cache = holding(stored)
    receipt = take_up(cache, stored, prompt, seconds=2.0)
    assert (receipt.submitted, receipt.matched, receipt.reused) == (matched + 2, matched, matched)
    assert receipt.why_fewer is None
    assert receipt.computed == 2
    assert receipt.saved_s == pytest.approx(2.0 * matched / 20)
    assert held(cache) == stored[:matched]


def test_of_a_prompt_that_is_stored_whole_the_last_token_is_forwarded() -> None:
    stored = [1, 2, 3]
    cache = holding(stored)
    receipt = take_up(cache, stored, stored)
    assert (receipt.matched, receipt.reused, receipt.why_fewer) == (3, 2, ONE_TOKEN)
    assert held(cache) == [1, 2]


def test_a_wrapped_window_serves_only_where_it_stands() -> None:
    stored = list(range(WINDOW + 4))
    cache = holding(stored, WINDOW)
    assert take_up(cache, stored, [*stored, 99]).reused == len(stored)
    receipt = take_up(cache, stored, [*stored[:10], 99])
    assert (receipt.matched, receipt.reused) == (10, 0)
    assert receipt.why_fewer is not None
    assert "window has let go" in receipt.why_fewer
    assert "stored at token 12 and needed at 10" in receipt.why_fewer
    assert cache.position == 0


def test_ids_that_the_cache_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="holds 2 tokens, not 3"):
        take_up(holding([1, 2]), [1, 2, 3], [1])
    with pytest.raises(ValueError, match="holds 2 tokens, not 3"):
        PrefixIndex().add([1, 2, 3], holding([1, 2]))


ids = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(stored=st.lists(ids, max_size=8), prompts=st.lists(ids, max_size=5), dropped=st.integers(0))
def test_the_index_finds_what_a_search_of_all_prefixes_finds(
    stored: list[list[int]], prompts: list[list[int]], dropped: int
) -> None:
    index = PrefixIndex()
    for one in stored:
        assert index.add(one, holding(one))
    there = {tuple(one) for one in stored}
    if there:
        gone = sorted(there)[dropped % len(there)]
        index.drop(gone)
        there.remove(gone)
    assert len(index) == len(there)
    for prompt in prompts:
        best = max((common_prefix(one, prompt) for one in there), default=0)
        cache, receipt = index.take(prompt)
        assert receipt.matched == best
        assert receipt.reused == min(best, len(prompt) - 1)
        assert (held(cache) if cache else []) == prompt[: receipt.reused]


def test_what_is_stored_does_not_change_with_what_is_taken() -> None:
    index, original = PrefixIndex(), holding([1, 2, 3])
    index.add([1, 2, 3], original)
    original.trim(2)
    taken, _ = index.take([1, 2, 9])
    assert taken is not None
    pair = torch.full((1, 1, 1, 2), 9.0)
    taken.layers[0].pairs.update(pair, pair)
    again, receipt = index.take([1, 2, 3, 4])
    assert again is not None
    assert (held(again), receipt.reused) == ([1, 2, 3], 3)


def test_a_shorter_exact_snapshot_serves_where_a_longer_wrapped_one_cannot() -> None:
    long = list(range(20))
    index = PrefixIndex()
    index.add(long, holding(long, WINDOW))
    index.add(long[:12], holding(long[:12], WINDOW))
    cache, receipt = index.take([*long[:15], 99])
    assert cache is not None
    assert (receipt.matched, receipt.reused) == (15, 12)
    assert "window has let go" in (receipt.why_fewer or "")


def test_the_prefix_not_used_for_longest_makes_room() -> None:
    one = holding([1] * 4).fork().bytes_allocated
    index = PrefixIndex(budget_bytes=2 * one)
    for token in (1, 2):
        index.add([token] * 4, holding([token] * 4))
    index.take([1, 1, 9])
    index.add([3] * 4, holding([3] * 4))
    assert index.bytes_allocated == 2 * one
    assert [index.take([token] * 5)[1].reused for token in (1, 2, 3)] == [4, 0, 4]
    assert not index.add([7] * 40, holding([7] * 40))
    assert len(index) == 2
