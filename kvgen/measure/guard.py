"""Held against free memory before anything is loaded or grown: refuse rather than be killed.

An operating system often ends a process that asks for too much without a word. The prediction of
weights and cache is exact, that of working memory an estimate. Imports torch to know the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgen.cache.policy import Policy
from kvgen.cache.raw_config import decoder_settings
from kvgen.cache.settings import POSITIONS, Settings
from kvgen.cache.shapes import specs_from_config
from kvgen.cache.shares import share_of
from kvgen.cache.spec import LayerSpec
from kvgen.cache.stepwise import Step
from kvgen.errors import InputError, KvgenError
from kvgen.measure.architecture import Architecture, read_architecture
from kvgen.measure.fit import ITEMSIZES, Fitter, Storage, kv_bytes
from kvgen.measure.size import expands_latent
from kvgen.models.device import choose_device
from kvgen.models.ranks import current
from kvgen.models.types import LoadedModel, LoadOptions

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Demand:
    """A sequence that is to be held: its final ``tokens``, ``chunk`` of which are forwarded at a
    time (``None``: the whole prompt), stored under ``policy`` (``None``: not stored); or ``batch``
    of them, prefilled one after another.
    """

    tokens: int
    policy: Policy | None
    chunk: int | None = None
    batch: int = 1


def free_bytes(device: str) -> int | None:
    """Memory that can still be had on a device such as ``cpu`` or ``cuda:0``, in bytes.

    ``None`` where nobody tells, as for ``mps``.
    """
    if device.startswith("cuda"):
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    if device != "cpu":
        return None
    import psutil

    available: int = psutil.virtual_memory().available
    allowed = _allowed_by_container()
    return available if allowed is None else min(available, allowed)


def check_heads(options: LoadOptions) -> None:
    """Raise ``UsageError`` where a model's heads cannot be shared out over this run's ranks.

    A model whose configuration cannot be read is left to the loading.
    """
    ranks = current()
    if ranks is None:
        return
    try:
        fields, specs, _ = _described(options)
    except KvgenError:
        return
    share_of(specs, fields, ranks.size)


def check_before_loading(options: LoadOptions, demand: Demand) -> None:
    """Weights and cache against what is free. Raises ``InputError`` with the numbers, and
    ``UsageError`` for a device that is not there.

    What cannot be predicted is not refused: loading will tell. Nor is what is spread over devices,
    for each of which only as much is chosen as fits.
    """
    device = str(choose_device(options.device))
    if options.spread == "auto":
        return
    free = _free_for_this_rank(device)
    try:
        fields, specs, architecture = _described(options)
    except KvgenError:
        return
    if free is None or architecture.weight_bytes is None:
        return
    itemsize = ITEMSIZES.get(options.dtype, architecture.itemsize)
    if options.dtype == "auto" and architecture.dtype == "float16" and device == "cpu":
        itemsize = 4  # 16-bit floats are loaded as float32 there
    weights = architecture.weight_bytes_in(itemsize) or 0
    ranks = current()
    if ranks is not None:
        weights, specs = weights // ranks.size, share_of(specs, fields, ranks.size)
    _check(fields, specs, itemsize, weights, free, demand)


def check_before_growing(loaded: LoadedModel, specs: Sequence[LayerSpec], demand: Demand) -> None:
    """The cache of a loaded model against what is free now. Raises ``InputError``."""
    free = _free_for_this_rank(str(loaded.device))
    if free is not None and all(spec.states is not None for spec in specs):
        _check(Settings(loaded.config), specs, loaded.dtype.itemsize, 0, free, demand)


def _described(options: LoadOptions) -> tuple[Settings, list[LayerSpec], Architecture]:
    """What is known of a model before it is loaded. Raises ``KvgenError`` where that is nothing."""
    architecture = read_architecture(options)
    fields = Settings(decoder_settings(architecture.config))
    expands = expands_latent(str(fields.get("model_type")))
    return fields, specs_from_config(architecture.config, expand_latent=expands), architecture


def _free_for_this_rank(device: str) -> int | None:
    """As ``free_bytes``; of several ranks, what the one with the least has.

    All ranks have looked before any goes on to take memory.
    """
    free, ranks = free_bytes(device), current()
    if ranks is None:
        return free
    every = ranks.gather(free // ranks.local_size if free and device == "cpu" else free)
    known = [one for one in every if one is not None]
    return min(known, default=None)


def _check(
    fields: Settings,
    specs: Sequence[LayerSpec],
    itemsize: int,
    weights: int,
    free: int,
    demand: Demand,
) -> None:
    limit = fields.integer(*POSITIONS)
    if limit is not None and demand.tokens > limit:
        return  # too long for the model itself, which is refused with that number
    stored: Sequence[LayerSpec] = specs if demand.policy is not None else ()
    storage = Storage("cache", itemsize, demand.policy or Step())
    fitter = Fitter(free - weights, fields, stored, itemsize, demand.chunk)
    try:
        one = kv_bytes(stored, demand.tokens, storage)
    except InputError:  # states without a rule
        return
    cache, working = one * demand.batch, fitter.working(demand.tokens)
    if weights + cache + working <= free:
        return
    rows = f" for {demand.batch} rows" if demand.batch > 1 else ""
    parts = [f"a KV cache of {_text(cache)}{rows}"] if stored else []
    parts = [*([f"weights of {_text(weights)}"] if weights else []), *parts]
    parts.append(f"about {_text(working)} to compute with")
    most = fitter.longest(storage, limit).longest_context
    advice = (
        f"a context of {most:,} tokens would fit; shorten it, store it smaller (--cache int8)"
        if most
        else "no context would fit; use a smaller model or --dtype bfloat16"
    )
    fewer = (free - weights - working) // one if one else 0
    if demand.batch > 1 and fewer > 0:
        advice = f"--batch-size {fewer} would fit"
    raise InputError(
        f"{demand.tokens:,} tokens need {_text(weights + cache + working)} "
        f"({', '.join(parts)}), and {_text(free)} are free: {advice}, or try anyway with "
        "--force"
    )


def _text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _allowed_by_container() -> int | None:
    """What the control group of this process, version 2, leaves to it; ``None`` without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text("ascii").strip()
        used = int((_CGROUP / "memory.current").read_text("ascii"))
        if limit == "max":
            return None
        # Pages of files that were read count as used and are given back when needed.
        counters = (_CGROUP / "memory.stat").read_text("ascii").split()
        cached = int(counters[counters.index("inactive_file") + 1])
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError, IndexError):
        return None
