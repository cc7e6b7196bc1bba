"""What a record says of the model that ran."""

from __future__ import annotations

from typing import Any

from kvgen.cache.manager import KVCache
from kvgen.measure.fit import Storage, growth, windowless
from kvgen.measure.records import ModelFacts, RankShares
from kvgen.models import LoadedModel
from kvgen.models.causal import build_skeleton
from kvgen.models.ranks import current


def model_facts(loaded: LoadedModel, weight_bytes: int, cache: KVCache | None) -> ModelFacts:
    """``weight_bytes`` are those of all weights and buffers here; ``cache`` is the one in use."""
    config, source = loaded.config, loaded.source
    per_token = None
    if cache and all(spec.states is not None for spec in cache.specs):
        storage = Storage("cache", loaded.dtype.itemsize, cache.policy)
        per_token = growth(windowless(cache.specs), storage)
    return ModelFacts(
        name=source.name,
        source=source.kind,
        path=str(source.path),
        revision=source.revision,
        model_type=config.model_type,
        parameters=_parameters(loaded),
        weight_bytes=weight_bytes,
        num_hidden_layers=config.num_hidden_layers,
        context_limit=loaded.context_limit,
        kv_bytes_per_token=per_token,
    )


def rank_shares(weight_bytes: int, cache: KVCache | None, itemsize: int) -> RankShares | None:
    """What every rank holds, each having counted its own; ``None`` where there is one process."""
    ranks = current()
    if ranks is None or ranks.stop_asked > 1:  # told twice, it did not wait for the others
        return None
    used, allocated = (cache.bytes_used, cache.bytes_allocated) if cache else (0, 0)
    every = ranks.gather((weight_bytes, used, allocated))
    held_each, used_each, allocated_each = (list(column) for column in zip(*every, strict=True))
    formula = cache.bytes_formula(itemsize) if cache else 0
    return RankShares(ranks.size, ranks.backend, held_each, used_each, allocated_each, formula)


def is_spread(model: Any) -> bool:
    """Whether its layers lie on more than one device."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def device_note(cache: KVCache) -> str:
    """Which layers' buffers lie where, and their bytes."""
    placed: dict[str, list[int]] = {}
    for index, layer in enumerate(cache.layers):
        for buffer in layer.buffers()[:1]:
            placed.setdefault(str(buffer.device), []).append(index)
    parts = [
        f"{sum(cache.layers[i].bytes_used for i in layers):,} bytes of {len(layers)} on {device}"
        for device, layers in placed.items()
    ]
    return f"the cache's layers lie where their weights do: {', '.join(parts)}"


def _parameters(loaded: LoadedModel) -> int:
    """Of the whole model, also where this rank's tensors are only its parts."""
    model = loaded.model if current() is None else build_skeleton(loaded.model.config, "")
    return sum(weight.numel() for weight in model.parameters())
