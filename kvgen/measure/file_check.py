"""A cache file held against the model: its tokens computed again, tensors and logits compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvgen.cache.adapter import TransformersCache, policy_for, specs_for
from kvgen.cache.fingerprint import fingerprint
from kvgen.cache.manager import KVCache
from kvgen.cache.saving import load_cache, open_for
from kvgen.engine.forward import Forward
from kvgen.engine.prompt import check_known
from kvgen.measure.records import Check
from kvgen.measure.verdict import (
    compare_step,
    first_rescaled,
    judge,
    largest_logit,
    lossy_tolerance,
    tolerance,
)
from kvgen.models import LoadedModel

_PIECE = 512  # tokens of one forward


@dataclass
class Difference:
    """Stored numbers against computed ones, where they differ most."""

    name: str
    """The tensor, as the file names it."""
    most: float
    """The largest difference, relative to the largest computed number of that tensor."""
    accepted: float
    """What rounding explains."""


@dataclass
class FileCheck:
    """What holding a cache file against the model found."""

    path: str
    tokens: int
    numbers: Difference | None
    """Absent for a storage policy that rounds or drops what it stores."""
    logits: Check
    """The prediction after one more token, against the uncached forward."""

    @property
    def sound(self) -> bool:
        """Whether nothing speaks against the file."""
        same = self.numbers is None or self.numbers.most <= self.numbers.accepted
        return same and self.logits.verdict != "broken"


def check_file(path: Path, loaded: LoadedModel, policy_text: str) -> FileCheck:
    """Compute the tokens of a cache file again, without it, and compare.

    Raises ``CacheFileError`` for a file that is damaged or was made otherwise.
    """
    specs = specs_for(loaded.model)
    policy = policy_for(loaded.model, policy_text)
    forward = Forward(loaded.model, loaded.attention, loaded.products)
    own = fingerprint(loaded.model, loaded.tokenizer, specs, policy, forward.attention)
    file = open_for(path, own)
    stored, computed = policy.make(specs), policy.make(specs)
    load_cache(file, stored, loaded.device)
    ids = file.ids
    check_known(ids, loaded.vocabulary)
    forward.extend(ids, TransformersCache(computed), _PIECE)
    dtype = loaded.dtype_name
    numbers = _largest_difference(stored, computed, dtype) if policy.exact else None

    # Any token will do to ask the cache for a prediction; the first is certainly a known one.
    logits = forward.cached(ids[:1], TransformersCache(stored))
    reference = forward.uncached([*ids, ids[0]])
    largest = largest_logit(reference)
    check = judge(
        [compare_step(0, logits, reference)],
        tolerance(dtype, largest),
        first_rescaled(loaded.rotary_change, len(ids) + 1),
        lossy_tolerance(policy.tolerance, largest),
    )
    return FileCheck(str(path), len(ids), numbers, check)


def _largest_difference(stored: KVCache, computed: KVCache, dtype: str) -> Difference:
    """Each tensor against its like; what should be the same whole numbers must be."""
    ours, theirs = stored.state().tensors, computed.state().tensors
    if {n: t.shape for n, t in ours.items()} != {n: t.shape for n, t in theirs.items()}:
        return Difference("the shapes", float("inf"), 0.0)
    worst = Difference("none", 0.0, tolerance(dtype, 1.0))
    for name, one in ours.items():
        if not one.numel():
            continue
        wanted = theirs[name].double()
        most = float((one.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        if not most <= worst.most:  # written so that a NaN counts
            worst = Difference(name, most, worst.accepted)
    return worst
