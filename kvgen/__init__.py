"""kvgen: text generation on a hand-written KV cache, with what the cache buys made visible.

The names below are the public Python API; each is loaded when it is first used, so that importing
kvgen loads neither torch nor transformers.

    import kvgen

    loaded = kvgen.load_model(kvgen.LoadOptions())
    run = kvgen.GenerationRun(loaded, kvgen.GenerationOptions(prompt="Time flies"))
    for piece in run.pieces():
        print(piece, end="")
    record = run.finish()
    print(record.steps[-1].kv_bytes_used, record.check.verdict)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvgen.cache.adapter import TransformersCache, specs_for
    from kvgen.cache.disk import open_cache_file
    from kvgen.cache.fingerprint import Fingerprint, fingerprint
    from kvgen.cache.manager import KVCache
    from kvgen.cache.saving import load_cache, save_cache
    from kvgen.cache.shapes import specs_from_config
    from kvgen.cache.spec import LayerSpec
    from kvgen.engine.decoder import Decoder
    from kvgen.engine.forward import Forward
    from kvgen.engine.sampling import Sampler, SamplingOptions
    from kvgen.errors import KvgenError
    from kvgen.measure.batch import BatchRun
    from kvgen.measure.batch_prompts import BatchOptions
    from kvgen.measure.batch_records import RowResult
    from kvgen.measure.checks import Outcome
    from kvgen.measure.records import Generation
    from kvgen.measure.requests import Request
    from kvgen.measure.run import GenerationOptions, GenerationRun
    from kvgen.measure.verify import Verifier
    from kvgen.models import LoadedModel, LoadOptions, load_model

_HOMES = {
    "kvgen.cache.adapter": ("TransformersCache", "specs_for"),
    "kvgen.cache.disk": ("open_cache_file",),
    "kvgen.cache.fingerprint": ("Fingerprint", "fingerprint"),
    "kvgen.cache.manager": ("KVCache",),
    "kvgen.cache.saving": ("load_cache", "save_cache"),
    "kvgen.cache.shapes": ("specs_from_config",),
    "kvgen.cache.spec": ("LayerSpec",),
    "kvgen.engine.decoder": ("Decoder",),
    "kvgen.engine.forward": ("Forward",),
    "kvgen.engine.sampling": ("Sampler", "SamplingOptions"),
    "kvgen.errors": ("KvgenError",),
    "kvgen.measure.batch": ("BatchRun",),
    "kvgen.measure.batch_prompts": ("BatchOptions",),
    "kvgen.measure.batch_records": ("RowResult",),
    "kvgen.measure.records": ("Generation",),
    "kvgen.measure.requests": ("Request",),
    "kvgen.measure.run": ("GenerationOptions", "GenerationRun"),
    "kvgen.measure.checks": ("Outcome",),
    "kvgen.measure.verify": ("Verifier",),
    "kvgen.models": ("LoadOptions", "LoadedModel", "load_model"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BatchOptions",
    "BatchRun",
    "Decoder",
    "Fingerprint",
    "Forward",
    "Generation",
    "GenerationOptions",
    "GenerationRun",
    "KVCache",
    "KvgenError",
    "LayerSpec",
    "LoadOptions",
    "LoadedModel",
    "Outcome",
    "Request",
    "RowResult",
    "Sampler",
    "SamplingOptions",
    "TransformersCache",
    "Verifier",
    "fingerprint",
    "load_cache",
    "load_model",
    "open_cache_file",
    "save_cache",
    "specs_for",
    "specs_from_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
