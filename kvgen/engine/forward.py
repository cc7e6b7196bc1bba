"""Forwards through a model, with our cache or without any. Knows torch, the cache and its
adapter; the model itself comes from outside.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvgen.cache.adapter import TransformersCache, cache_argument, continues_prefill
from kvgen.cache.quirks import (
    counts_own_positions,
    lend_states,
    state_holders,
    take_back_states,
)
from kvgen.cache.spec import LayerSpec
from kvgen.engine.attention import one_query_attention, own_attention
from kvgen.engine.finite import NotFiniteError, first_not_finite, told
from kvgen.errors import UsageError
from kvgen.models.products import OneRowProducts


def check_piece(model: Any, specs: Sequence[LayerSpec], piece: int | None) -> None:
    """Raise ``UsageError`` for a ``piece`` of several tokens that the model cannot go on after."""
    if piece not in (None, 1) and not continues_prefill(model, specs):
        raise UsageError(
            f"{model.config.model_type} does not continue its state over a second forward of "
            "several tokens; leave out --prefill-chunk, or make it 1"
        )


class Forward:
    """A causal language model reduced to: ids in, logits out.

    Where only the last position is asked for, only its logits are computed: for a long prompt the
    full ``[tokens, vocab]`` matrix can be larger than the whole KV cache.
    """

    def __init__(
        self, model: Any, attention: str = "auto", products: Mapping[str, str] | None = None
    ) -> None:
        """``model`` is a transformers causal language model in eval mode.

        ``attention`` and ``products`` say what a single token attends with and how its row is
        multiplied (see ``one_query_attention`` and ``choose_products``).
        """
        self._model = model
        ours = one_query_attention(model, attention)
        self.attention = own_attention(model) if ours is None else f"kvgen, {ours.own}"
        self.stored_as = self.attention
        """What a cache file names. A compiled step keeps the name of the one it stands in for, as
        it stores the same pairs: then either reads the other's files."""
        self.products = products or {}
        self._attending = ours or nullcontext()
        self._multiplying = OneRowProducts(model, self.products)
        self._device = model.device
        parameters = inspect.signature(type(model).forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._state_holders = state_holders(model)
        self._takes_positions = "position_ids" in parameters and not counts_own_positions(model)

    @cached_property
    def _cache_argument(self) -> str:
        # Asked for once, and only where there is a cache: a model may have no such argument.
        return cache_argument(self._model)

    def cached(self, ids: list[int], cache: TransformersCache) -> Tensor:
        """Forward ``ids`` after what ``cache`` holds, and add them to it.

        Returns the logits ``[vocab]`` that follow the last id.
        """
        # A copy, so that a view never keeps a whole [tokens, vocab] matrix alive.
        return self._run_cached(ids, cache, **self._last_only)[-1].clone()

    def ready(self, cache: TransformersCache) -> None:
        """Do now what the next single token would do first and is no part of its step."""

    def uncached(self, ids: list[int]) -> Tensor:
        """Forward the whole of ``ids`` from nothing; the logits ``[vocab]`` after the last."""
        return self._run(ids, **self._last_only, use_cache=False)[-1].clone()

    def extend(self, ids: list[int], cache: TransformersCache, piece: int | None = None) -> Tensor:
        """As ``cached``, in pieces of at most ``piece`` tokens, all at once by default.

        A model that starts its state over at a second piece gets everything at once on an empty
        cache, and single tokens later.
        """
        if not continues_prefill(self._model, cache.kv.specs):
            piece = 1 if cache.kv.position else None
        size = piece or len(ids)
        for begin in range(0, len(ids), size):
            logits = self.cached(ids[begin : begin + size], cache)
        return logits

    def cached_everywhere(self, ids: list[int], cache: TransformersCache) -> Tensor:
        """As ``cached``, but the logits after each id, ``[ids, vocab]``."""
        return self._run_cached(ids, cache)

    def uncached_everywhere(self, ids: list[int]) -> Tensor:
        """As ``uncached``, but the logits after each id, ``[ids, vocab]``."""
        return self._run(ids, use_cache=False)

    def rows(
        self, rows: list[list[int]], padding: list[int], cache: TransformersCache | None = None
    ) -> Tensor:
        """Forward a batch of equally long ``rows``; the logits ``[rows, ids, vocab]``.

        ``padding`` counts the meaningless ids that each row's sequence begins with; they are masked
        and its positions start after them. With ``cache``, the rows follow what it holds of them.
        """
        first, count = (cache.kv.position if cache else 0), len(rows[0])
        offsets = torch.tensor(padding, device=self._device).unsqueeze(1)
        inputs: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            inputs[self._cache_argument] = cache
        # A recurrent layer reads padding only where it is forwarded.
        reads_pairs = cache is None or any(spec.has_pairs for spec in cache.kv.specs)
        if any(padding) and (reads_pairs or first < max(padding)):
            every = torch.arange(first + count, device=self._device)
            inputs["attention_mask"] = (every >= offsets).long()
        if self._takes_positions:
            positions = torch.arange(first, first + count, device=self._device)
            inputs["position_ids"] = (positions - offsets).clamp(min=0)
        if cache is not None:
            lend_states(self._state_holders, cache.kv)
        one = cache is not None and count == 1
        with torch.inference_mode(), self._one_token() if one else nullcontext():
            batch = torch.tensor(rows, device=self._device)
            logits: Tensor = self._model(input_ids=batch, return_dict=True, **inputs).logits
            if cache is not None:
                take_back_states(self._state_holders, cache.kv)
        if cache is not None:
            cache.kv.advance(count)
        return logits

    def after(self, ids: list[int], cache: Any, position: int) -> Tensor:
        """Forward ``ids`` at ``position`` with any cache the model takes, which stores them.

        Returns the logits ``[vocab]`` that follow the last id.
        """
        return self._run(ids, **self._inputs(len(ids), cache, position), **self._last_only)[-1]

    @contextmanager
    def _one_token(self) -> Iterator[None]:
        with self._attending, self._multiplying:
            yield

    def not_finite(self, ids: list[int], step: int | None) -> NotFiniteError:
        """The error for logits after ``ids`` that are not finite: forwards once more to find where
        it begins.
        """
        place = first_not_finite(self._model, lambda: self.uncached(ids))
        at = f"after {len(ids):,} tokens" if step is None else f"at step {step}"
        return NotFiniteError(told(at, place))

    def _run_cached(self, ids: list[int], cache: TransformersCache, **more: Any) -> Tensor:
        inputs = self._inputs(len(ids), cache, cache.kv.position)
        lend_states(self._state_holders, cache.kv)
        with self._one_token() if len(ids) == 1 else nullcontext():
            logits = self._run(ids, **inputs, **more)
        take_back_states(self._state_holders, cache.kv)
        cache.kv.advance(len(ids))
        return logits

    def _inputs(self, tokens: int, cache: Any, position: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if self._takes_positions:
            positions = torch.arange(position, position + tokens, device=self._device)
            inputs["position_ids"] = positions.unsqueeze(0)
        return inputs

    def _run(self, ids: list[int], **inputs: Any) -> Tensor:
        with torch.inference_mode():
            batch = torch.tensor([ids], device=self._device)
            output = self._model(input_ids=batch, return_dict=True, **inputs)
            logits: Tensor = output.logits[0]
            return logits
