"""The storage policies that ``--cache NAME`` knows: the one place where a new one is entered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvgen.cache.manager import KVCache
from kvgen.cache.spec import LayerSpec
from kvgen.errors import UsageError

DEFAULT = "step"


@dataclass(frozen=True)
class Policy:
    """A way of storing pairs: ``make`` builds an empty cache from a model's layer specs."""

    description: str
    make: Callable[[Sequence[LayerSpec]], KVCache]


POLICIES: dict[str, Policy] = {DEFAULT: Policy("buffers that grow in steps", KVCache)}


def find_policy(name: str) -> Policy:
    """The policy called ``name``. Raises ``UsageError`` listing the known ones."""
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise UsageError(f"unknown cache {name!r}; kvgen has: {known}")
    return POLICIES[name]
