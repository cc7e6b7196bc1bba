"""What a record says of the model that ran."""

from __future__ import annotations

from kvgen.cache.manager import KVCache
from kvgen.measure.fit import Storage, growth, windowless
from kvgen.measure.records import ModelFacts
from kvgen.models import LoadedModel
from kvgen.models.packed import weights


def model_facts(loaded: LoadedModel, weight_bytes: int, cache: KVCache | None) -> ModelFacts:
    """``weight_bytes`` are those of all weights and buffers; ``cache`` is the one that is used."""
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
        parameters=sum(weight.numel() for weight in weights(loaded.model).values()),
        weight_bytes=weight_bytes,
        num_hidden_layers=config.num_hidden_layers,
        context_limit=loaded.context_limit,
        kv_bytes_per_token=per_token,
    )
