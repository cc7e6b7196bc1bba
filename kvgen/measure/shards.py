"""One batch in several runs: which prompts each run takes, and their results as one file again.

Knows no tokenizer and no model, so every run works the division out for itself and all agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor

from kvgen.cache.trie import common_prefix
from kvgen.errors import UsageError
from kvgen.measure.requests import Id, Request

# How far a border may move to where less is torn apart, as a part of a shard.
_GIVE = 0.25


def shard_of(requests: Sequence[Request], index: int, count: int) -> list[Request]:
    """Shard ``index``, counted from 1, of ``count``; in the order of ``requests``.

    Prompts that begin alike stay together, since what they share is computed once in each shard
    that has some of them. Sorted by their text they are neighbours; the sorted list is cut at the
    even places, each moved to where its neighbours have least in common nearby. So shards differ in
    size by half at most.
    """
    order = sorted(range(len(requests)), key=lambda i: _text(requests[i]))
    texts = [_text(requests[i]) for i in order]
    begin, end = _border(texts, index - 1, count), _border(texts, index, count)
    return [requests[i] for i in sorted(order[begin:end])]


def _border(texts: Sequence[bytes], after: int, count: int) -> int:
    """Where the first ``after`` shards end."""
    even = len(texts) * after / count
    give = 0.0 if after in (0, count) else _GIVE * len(texts) / count
    near: set[int] = {round(even), *range(ceil(even - give), floor(even + give) + 1)}
    return min(near, key=lambda place: (_torn(texts, place), abs(place - even), place))


def _torn(texts: Sequence[bytes], place: int) -> int:
    """What the neighbours of a border have in common."""
    return common_prefix(*texts[place - 1 : place + 1]) if 0 < place < len(texts) else 0


def _text(request: Request) -> bytes:
    """What the model gets to read first comes first."""
    if request.messages is not None:
        parts = [part for m in request.messages for part in (m["role"], m["content"])]
    else:
        parts = [request.system or "", request.prompt or ""]
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def merged(
    requests: Iterable[Request], parts: Iterable[tuple[str, Mapping[Id, bytes]]]
) -> tuple[list[bytes], list[Request]]:
    """The result lines in the order of the requests, and the requests that have none.

    ``parts`` are names and lines by id. Raises ``UsageError`` for a result that two parts have, or
    that belongs to no request.
    """
    lines: dict[Id, tuple[str, bytes]] = {}
    for name, part in parts:
        for key, line in part.items():
            if key in lines:
                raise UsageError(
                    f"both {lines[key][0]} and {name} have a result with the id {json.dumps(key)}; "
                    "merge each shard once"
                )
            lines[key] = name, line
    found, missing = [], []
    for request in requests:
        if request.id in lines:
            found.append(lines.pop(request.id)[1])
        else:
            missing.append(request)
    if lines:
        key, (name, _) = next(iter(lines.items()))
        raise UsageError(
            f"{name} has a result with the id {json.dumps(key)}, which no prompt has; merge with "
            "the file of prompts that the shards were run on"
        )
    return found, missing
