"""One forward through a model, with our cache or without any. Knows torch, the cache and its
adapter; the model itself comes from outside.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvgen.cache.adapter import TransformersCache, cache_argument


class Forward:
    """A causal language model reduced to: ids in, the last position's logits out.

    Only the last position's logits are computed: for a long prompt the full
    ``[tokens, vocab]`` matrix can be larger than the whole KV cache.
    """

    def __init__(self, model: Any) -> None:
        """``model`` is a transformers causal language model in eval mode."""
        self._model = model
        self._device = model.device
        parameters = inspect.signature(type(model).forward).parameters
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters

    def cached(self, ids: list[int], cache: TransformersCache) -> Tensor:
        """Forward ``ids`` after what ``cache`` holds, and add them to it.

        Returns the logits ``[vocab]`` that follow the last id.
        """
        logits = self.after(ids, cache, cache.kv.position)
        cache.kv.advance(len(ids))
        return logits

    def after(self, ids: list[int], cache: Any, position: int) -> Tensor:
        """Forward ``ids`` at ``position`` with any cache the model takes, which stores them.

        Returns the logits ``[vocab]`` that follow the last id.
        """
        inputs: dict[str, Any] = {cache_argument(self._model): cache, "use_cache": True}
        if self._takes_positions:
            positions = torch.arange(position, position + len(ids), device=self._device)
            inputs["position_ids"] = positions.unsqueeze(0)
        return self._run(ids, **inputs)

    def uncached(self, ids: list[int]) -> Tensor:
        """Forward the whole of ``ids`` from nothing; the logits ``[vocab]`` after the last."""
        return self._run(ids, use_cache=False)

    def _run(self, ids: list[int], **inputs: Any) -> Tensor:
        with torch.inference_mode():
            batch = torch.tensor([ids], device=self._device)
            output = self._model(input_ids=batch, return_dict=True, **self._keep, **inputs)
            # A copy, so that a view never keeps a whole [tokens, vocab] matrix alive.
            logits: Tensor = output.logits[0, -1]
            return logits if self._keep else logits.clone()
