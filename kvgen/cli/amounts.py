"""Counts and sizes as people write them: ``4k,32k`` tokens, ``24GiB``."""

from __future__ import annotations

import re

from kvgen.errors import UsageError

_COUNT = re.compile(r"(\d+)([kKmM]?)")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_TIMES = {"": 1, "k": 1024, "m": 1024**2}


def counts(name: str, text: str) -> tuple[int, ...]:
    """``4k,32k,500``: numbers of at least 1, ``k`` for 1,024. Raises ``UsageError``."""
    found = []
    for part in text.replace("_", "").split(","):
        match = _COUNT.fullmatch(part.strip())
        if not match or int(match[1]) < 1:
            raise UsageError(f"{name} {text}: cannot read {part!r}; write numbers, such as 4k,32k")
        found.append(int(match[1]) * _TIMES[match[2].lower()])
    return tuple(dict.fromkeys(found))


def memory(name: str, text: str) -> int:
    """Bytes: ``24GiB``, ``1.5GB``, ``46080``. Raises ``UsageError``."""
    match = _MEMORY.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{name} {text}: expected a size, such as 24GiB or 1.5GB or 46080")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
