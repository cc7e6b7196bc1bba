"""Whether a model's rows can be decoded together, found out by trying, before any result."""

from __future__ import annotations

import torch

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.cache.policy import Policy
from kvgen.cache.quirks import takes_padding
from kvgen.cache.rows import stack, why_alone
from kvgen.cache.spec import LayerSpec
from kvgen.engine.forward import Forward
from kvgen.measure.verdict import largest_logit, tolerance
from kvgen.models import LoadedModel

_LENGTHS = (6, 3)  # unlike, so that one row is padded


def why_not_together(
    loaded: LoadedModel,
    forward: Forward,
    specs: list[LayerSpec],
    policy: Policy,
    ids: list[int],
) -> str | None:
    """Why a row would predict otherwise beside others than alone; ``None`` if it does not.

    Forwards a few of ``ids`` alone and together, which warms both shapes up as well.
    """
    model_type = loaded.config.model_type
    if (why := why_alone(specs, policy)) is not None:
        return why
    if not takes_padding(loaded.model):
        return f"{model_type} counts the columns of its mask in its own way"
    prompts = [(ids * length)[:length] for length in _LENGTHS]
    caches = [_holding(forward, specs, policy, prompt) for prompt in prompts]
    both = TransformersCache(stack([cache.kv for cache in caches]))
    newest = [[prompt[-1]] for prompt in prompts]
    padding = [max(_LENGTHS) - length for length in _LENGTHS]
    together = forward.rows(newest, padding, both)[:, -1]
    pairs = zip(newest, caches, strict=True)
    alone = torch.stack([forward.cached(token, cache) for token, cache in pairs])
    dtype = str(loaded.dtype).removeprefix("torch.")
    if float((together - alone).abs().max()) <= tolerance(dtype, largest_logit(alone)):
        return None
    return f"{model_type} predicts otherwise for a row that is padded"


def _holding(
    forward: Forward, specs: list[LayerSpec], policy: Policy, ids: list[int]
) -> TransformersCache:
    cache = TransformersCache(KVCache(specs, policy=policy))
    forward.cached(ids, cache)
    return cache
