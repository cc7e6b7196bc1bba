"""Which tokens a comparison runs over: chosen, saved, and replayed. Knows a tokenizer, no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgen.engine.prompt import encode
from kvgen.errors import UsageError
from kvgen.measure.builtin import TEXT
from kvgen.measure.compare import Track
from kvgen.measure.comparison_records import Row

SCHEMA = "kvgen.tokens/1"


def builtin_ids(tokenizer: Any, count: int) -> list[int]:
    """The first ``count`` ids of the built-in text, repeated as often as it takes."""
    ids: list[int] = encode(tokenizer, TEXT)
    copies = 1
    while len(ids) < count:
        copies = max(copies + 1, copies * count // len(ids) + 1)
        ids = encode(tokenizer, "\n".join([TEXT] * copies))
    return ids[:count]


def tracks_for(
    tokenizer: Any, prompt: list[int] | None, prompt_tokens: int, depths: Sequence[int]
) -> list[Track]:
    """One track per depth: that many ids of the built-in text, then the prompt.

    Without a ``prompt`` the text goes on for ``prompt_tokens``. A begin-of-text id stands at the
    very start only.
    """
    length = max(depths) + (prompt_tokens if prompt is None else 0)
    text = builtin_ids(tokenizer, length) if length else []
    tracks = []
    for depth in depths:
        own = text[depth : depth + prompt_tokens] if prompt is None else prompt
        if prompt is not None and depth and len(own) > 1 and own[0] == tokenizer.bos_token_id:
            own = own[1:]
        tracks.append(Track(text[:depth], own))
    return tracks


def tokens_document(model: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--save-tokens`` writes and ``--tokens`` reads; ids only."""
    fields = [
        {"depth": row.depth, "context_ids": row.context_ids, "new_ids": row.new_ids} for row in rows
    ]
    return {"schema": SCHEMA, "model": model, "rows": fields}


def read_tokens(path: Path) -> list[Track]:
    """The tracks in a file that ``--save-tokens`` wrote, or in a result saved as JSON.

    Raises ``UsageError`` for any other file.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
        tracks = [_track(row) for row in document["rows"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"cannot replay {path}: expected what --save-tokens or --export FILE.json wrote "
            f"({_reason(error)})"
        ) from error
    lengths = {len(track.new_ids or []) for track in tracks}
    if len(lengths) != 1 or 0 in lengths:
        raise UsageError(f"cannot replay {path}: every row must have the same number of new ids")
    return tracks


def check_vocabulary(tracks: Sequence[Track], vocab_size: int) -> None:
    """Raise ``UsageError`` for an id that the model does not know."""
    largest = max(max(track.ids + (track.new_ids or [])) for track in tracks)
    if largest >= vocab_size:
        raise UsageError(
            f"token id {largest} is not in this model's vocabulary of {vocab_size}; "
            "the tokens were saved from another model"
        )


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _track(row: dict[str, Any]) -> Track:
    depth, ids, new = row["depth"], row["context_ids"], row["new_ids"]
    for values in (ids, new):
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise ValueError("ids must be whole numbers from 0")
    if not isinstance(depth, int) or not 0 <= depth < len(ids):
        raise ValueError("a row's prompt is empty")
    return Track(ids[:depth], ids[depth:], new)
