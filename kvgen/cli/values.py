"""Option values with a notation of their own. Every refusal says what was expected."""

from __future__ import annotations

import re

from kvgen.errors import UsageError

_RANGE = re.compile(r"(\d+)-(\d+)([*+])(\d+)")
_COUNT = re.compile(r"(\d+)([kKmM]?)")
_TIMES = {"": 1, "k": 1024, "m": 1024**2}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_PREFIXES = " kmgt"
_MOST_DEPTHS = 1000
_SHARD = re.compile(r"(\d+)/(\d+)")


def counts(name: str, text: str) -> tuple[int, ...]:
    """``4k,32k,500``: numbers of at least 1, ``k`` for 1,024. Raises ``UsageError``."""
    found = []
    for part in text.replace("_", "").split(","):
        match = _COUNT.fullmatch(part.strip())
        if not match or int(match[1]) < 1:
            raise UsageError(f"{name} {text}: cannot read {part!r}; write numbers, such as 4k,32k")
        found.append(int(match[1]) * _TIMES[match[2].lower()])
    return tuple(dict.fromkeys(found))


def depths(text: str) -> tuple[int, ...]:
    """``0,512,2048``, ranges ``128-4096*2`` (doubling) and ``0-4096+1024`` (by steps), or both.

    Ascending, each once. Raises ``UsageError``.
    """
    found: set[int] = set()
    for part in text.replace("_", "").split(","):
        part = part.strip()
        match = _RANGE.fullmatch(part)
        if match:
            found.update(_range(part, match))
        elif part.isascii() and part.isdigit():
            found.add(int(part))
        else:
            raise UsageError(
                f"--depth {text}: cannot read {part!r}; write numbers and ranges, such as "
                "0,512,2048 or 128-4096*2 or 0-4096+1024"
            )
    return tuple(sorted(found))


def _range(part: str, match: re.Match[str]) -> list[int]:
    first, last, step = int(match[1]), int(match[2]), int(match[4])
    if first > last:
        raise UsageError(f"--depth {part}: the range begins after its end")
    if (match[3] == "*" and (step < 2 or first < 1)) or step < 1:
        raise UsageError(f"--depth {part}: the range would never end; use *2 from 1 up, or +1")
    if match[3] == "+" and (last - first) // step >= _MOST_DEPTHS:
        raise UsageError(f"--depth {part}: more than {_MOST_DEPTHS:,} depths; take larger steps")
    values = [first]
    while (following := values[-1] * step if match[3] == "*" else values[-1] + step) <= last:
        values.append(following)
    return values


def size(name: str, text: str) -> int:
    """Bytes: ``40MiB``, ``1.5GB``, ``46080``. Raises ``UsageError``."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{name} {text}: expected a size, such as 24GiB or 1.5GB or 46080")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _PREFIXES.index(match[2].lower() or " "))


def part(name: str, text: str) -> float:
    """A part of one: ``10%`` or ``0.1``. Raises ``UsageError``."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 100:
        raise UsageError(f"{name} {text}: expected a part, such as 10% or 0.1")
    return value


def shard(text: str) -> tuple[int, int]:
    """``2/4``, the second of four. Raises ``UsageError``."""
    match = _SHARD.fullmatch(text.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: expected a shard of all, such as 1/4 to 4/4")
    return int(match[1]), int(match[2])
