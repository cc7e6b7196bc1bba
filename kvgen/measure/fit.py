"""How much fits: bytes of a cache under a storage, and the search for what a budget allows.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

from kvgen.cache.policies import DEFAULT, find_policy
from kvgen.cache.policy import Policy
from kvgen.cache.settings import Settings
from kvgen.cache.spec import LayerSpec, total_bytes
from kvgen.errors import InputError, UsageError
from kvgen.measure.size_records import Fit
from kvgen.measure.working_memory import working_bytes

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED = ("int8", "int4")
# Beyond every model's positions; a search for the longest context ends here.
_MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class Storage:
    """A cache dtype, as a user names it, as what it means for the formula."""

    name: str
    itemsize: int
    policy: Policy


def find_storage(name: str, itemsize: int, cache: str | None) -> Storage:
    """``float16`` and its like under the policy ``cache``; ``int8`` and ``int4`` for a model of
    ``itemsize`` bytes per number.

    Raises ``UsageError`` for an unknown name, and for two storages at once.
    """
    if name in ITEMSIZES:
        return Storage(name, ITEMSIZES[name], find_policy(cache or DEFAULT))
    if name not in QUANTIZED:
        known = ", ".join((*ITEMSIZES, *QUANTIZED))
        raise UsageError(f"--kv-dtype has no {name!r}; choose from {known}")
    if cache is not None:
        raise UsageError(f"--kv-dtype {name} is a storage of its own; leave out --cache")
    return Storage(name, itemsize, find_policy(name))


def kv_bytes(specs: Sequence[LayerSpec], tokens: int, storage: Storage, batch: int = 1) -> int:
    """The formula. Raises ``InputError`` where a layer has none."""
    found = total_bytes(specs, tokens, storage.itemsize, batch, storage.policy)
    if found is None:
        kind = next(spec.kind for spec in specs if spec.states is None)
        raise InputError(
            f"no formula is known for the states of this model's {kind} layers; kvgen measures "
            "them: kvgen generate"
        )
    return found


def windowless(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The same layers without their windows."""
    return [replace(spec, window=None) if spec.window else spec for spec in specs]


def growth(specs: Sequence[LayerSpec], storage: Storage, after: int | None = None) -> int:
    """Bytes that one more token adds, rounded up; averaged where tokens are stored in blocks."""
    rates = [part.rate for spec in specs for part in spec.compressed]
    span = lcm(storage.policy.even_span, *rates)
    begin = after or (1 if span == 1 else 1 << 16)
    grown = kv_bytes(specs, begin + span, storage) - kv_bytes(specs, begin, storage)
    return -(-grown // span)


class Fitter:
    """Searches what fits into the budget beside the weights and the working memory."""

    def __init__(
        self,
        left: int,
        fields: Settings,
        specs: Sequence[LayerSpec],
        itemsize: int,
        chunk: int | None,
    ) -> None:
        """``left`` bytes are free beside the weights, which have ``itemsize`` bytes per number. A
        prompt is forwarded ``chunk`` tokens at a time; ``None`` forwards it whole.
        """
        self._left, self._itemsize = left, itemsize
        self._fields, self._specs, self._chunk = fields, specs, chunk

    def longest(self, storage: Storage, limit: int | None) -> Fit:
        """The longest context of one sequence."""
        most = limit or _MOST_TOKENS
        tokens = largest(lambda n: self.fits(n, 1, storage), most)
        return Fit(
            kv_dtype=storage.name,
            longest_context=tokens,
            limited_by="model" if tokens == most else "memory",
            kv_bytes=kv_bytes(self._specs, tokens, storage),
            working_bytes=self.working(tokens, 1),
        )

    def largest_batch(self, context: int, storage: Storage) -> int:
        """The most sequences of ``context`` tokens each."""
        return largest(lambda batch: self.fits(context, batch, storage), _MOST_TOKENS)

    def fits(self, tokens: int, batch: int, storage: Storage) -> bool:
        """Whether the cache and the working memory do."""
        kv = kv_bytes(self._specs, tokens, storage, batch)
        return kv + self.working(tokens, batch) <= self._left

    def working(self, tokens: int, batch: int = 1) -> int:
        """The estimate of working memory."""
        chunk = min(tokens, self._chunk or tokens)
        return working_bytes(self._fields, self._specs, tokens, chunk, self._itemsize) * batch


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest n up to ``most`` for which ``holds(n)``, which holds up to some n; 0 if none."""
    low, high = 0, 1
    while high < most and holds(high):
        low, high = high, min(high * 2, most)
    if high == most and holds(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
