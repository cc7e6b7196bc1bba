"""The oracle: the model itself, without a cache and without a line of kvgen.

A plain forward over the whole sequence gives the logits of every position, and an argmax loop over
such forwards gives the ids that greedy decoding must give.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvgen.cache.manager import KVCache
from kvgen.cache.shapes import specs_from_config
from kvgen.engine.decoder import Decoder
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler, SamplingOptions


class Greedy(NamedTuple):
    """A greedy continuation: the new ids and the logits ``[new, vocab]`` they are the argmax of."""

    ids: list[int]
    logits: Tensor


@torch.inference_mode()
def full_logits(model: Any, ids: list[int]) -> Tensor:
    """``[tokens, vocab]``: row i follows the first i + 1 ids."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def uncached_greedy(model: Any, prompt: list[int], new_tokens: int) -> Greedy:
    """The model's own argmax loop, the whole sequence forwarded for every token."""
    ids, rows = list(prompt), []
    for _ in range(new_tokens):
        rows.append(full_logits(model, ids)[-1])
        ids.append(int(rows[-1].argmax()))
    return Greedy(ids[len(prompt) :], torch.stack(rows))


def new_cache(model: Any, step: int = 16) -> KVCache:
    """kvgen's cache for ``model``, growing by ``step`` slots."""
    return KVCache(specs_from_config(model.config.get_text_config(decoder=True)), step=step)


def decoder(model: Any, ids: list[int], cache: KVCache | None, chunk: int | None = None) -> Decoder:
    """kvgen's greedy decoder for ``model``."""
    return Decoder(Forward(model), ids, Sampler(SamplingOptions()), cache, chunk)


def steps(running: Decoder, count: int) -> Greedy:
    """The next ``count`` steps of a decoder."""
    tokens = [running.step() for _ in range(count)]
    return Greedy([token.id for token in tokens], torch.stack([token.logits for token in tokens]))


def largest_difference(left: Tensor, right: Tensor) -> float:
    """The largest |left - right|."""
    return float((left - right).abs().max())
