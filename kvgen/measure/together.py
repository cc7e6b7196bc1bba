"""Whether a model's rows can be decoded together and share prefixes, before any result."""

from __future__ import annotations

import torch

from kvgen.cache.adapter import TransformersCache, continues_prefill
from kvgen.cache.policy import Policy
from kvgen.cache.quirks import takes_padding
from kvgen.cache.rows import stack, why_alone
from kvgen.cache.spec import LayerSpec
from kvgen.engine.forward import Forward
from kvgen.measure.verdict import largest_logit, tolerance
from kvgen.models import LoadedModel

_LENGTHS = (6, 3)  # unlike, so that one row is padded


def why_not_shared(loaded: LoadedModel, specs: list[LayerSpec], longest: int) -> str | None:
    """Why a prompt after a stored prefix would predict otherwise; ``None`` if it does not.

    ``longest`` is the tokens of the longest sequence to come.
    """
    if not continues_prefill(loaded.model, specs):
        return (
            f"{loaded.config.model_type} starts its state over at a second forward of several "
            "tokens"
        )
    return _rescaled(loaded, longest)


def why_not_together(
    loaded: LoadedModel,
    forward: Forward,
    specs: list[LayerSpec],
    policy: Policy,
    ids: list[int],
    longest: int,
) -> str | None:
    """Why a row would predict otherwise beside others than alone; ``None`` if it does not.

    Tries it: forwards a few of ``ids`` alone and together. ``longest`` as in ``why_not_shared``.
    """
    model_type = loaded.config.model_type
    if (why := _rescaled(loaded, longest)) is not None:
        return why
    if (why := why_alone(specs, policy)) is not None:
        return why
    if not takes_padding(loaded.model):
        return f"{model_type} counts the columns of its mask in its own way"
    prompts = [(ids * length)[:length] for length in _LENGTHS]
    caches = [_holding(forward, specs, policy, prompt) for prompt in prompts]
    both = TransformersCache(stack([cache.kv for cache in caches], len(caches)))
    newest = [[prompt[-1]] for prompt in prompts]
    padding = [max(_LENGTHS) - length for length in _LENGTHS]
    together = forward.rows(newest, padding, both)[:, -1]
    pairs = zip(newest, caches, strict=True)
    alone = torch.stack([forward.cached(token, cache) for token, cache in pairs])
    if float((together - alone).abs().max()) <= tolerance(loaded.dtype_name, largest_logit(alone)):
        return None
    return f"{model_type} predicts otherwise for a row that is padded"


def _rescaled(loaded: LoadedModel, longest: int) -> str | None:
    change = loaded.rotary_change
    if change is None or longest <= change:
        return None
    return (
        f"past {change:,} tokens {loaded.config.model_type} makes the keys of a whole forward with "
        "another rotary base"
    )


def _holding(
    forward: Forward, specs: list[LayerSpec], policy: Policy, ids: list[int]
) -> TransformersCache:
    cache = TransformersCache(policy.make(specs))
    forward.cached(ids, cache)
    return cache
