"""A comparison as one JSON document, and the same document read back into its record."""

from __future__ import annotations

import json
import types
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvgen.errors import UsageError
from kvgen.measure.comparison_records import Comparison

SCHEMA = "kvgen.compare/1"


def comparison_document(record: Comparison) -> dict[str, Any]:
    """The whole record under its schema's name; the fields are described in ``docs/json.md``."""
    return {"schema": SCHEMA} | asdict(record)


def read_comparison(path: Path) -> Comparison:
    """The record in a file that ``kvgen compare`` wrote as JSON.

    Raises ``UsageError`` for any other file and for another version of the schema.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        what = f"schema {found!r}" if found else "no schema"
        raise UsageError(
            f"{path} has {what} where {SCHEMA!r} is expected; save results with "
            "kvgen compare --export FILE.json"
        )
    try:
        record: Comparison = _built(Comparison, document)
        _check_whole(record)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is not a whole {SCHEMA} document: {error}") from error
    return record


def _check_whole(record: Comparison) -> None:
    """Raise ``ValueError`` for lists that are empty or do not belong together."""
    names = [facts.name for facts in record.contestants]
    if not names or not record.depths:
        raise ValueError("contestants and depths may not be empty")
    if record.complete and [row.depth for row in record.rows] != record.depths:
        raise ValueError("it is complete, but its rows are not those of its depths")
    for row in record.rows:
        if [item.contestant for item in row.results] != names:
            raise ValueError(f"the results at depth {row.depth} are not those of its contestants")
        if not row.context_ids or not 1 <= len(row.new_ids) == record.new_tokens:
            raise ValueError(f"the tokens at depth {row.depth} are missing or too many")
        short = [item for item in row.results if len(item.step_s) != len(row.new_ids)]
        if record.complete and short:
            raise ValueError(f"{short[0].contestant} lacks steps at depth {row.depth}")


def _built(kind: Any, value: Any, where: str = "") -> Any:
    """``value`` as ``kind``: a dataclass, a list, a choice, a union with None, or a plain type.

    Fields that the record does not know are passed over: later releases may add some.
    """
    origin = get_origin(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict):
            raise TypeError(f"{where.rstrip('.') or 'the document'} must be an object")
        given = [field for field in fields(kind) if field.name in value]
        # What may be null, or names nothing, may be absent: earlier releases lack what came later.
        needed = [
            f for f in fields(kind) if f.default is not None and f.default_factory is not dict
        ]
        absent = [f.name for f in needed if f not in given]
        if absent:
            raise ValueError(f"{where}{absent[0]} is missing")
        parts = {f.name: _built(hints[f.name], value[f.name], f"{where}{f.name}.") for f in given}
        return kind(**parts)  # type: ignore[operator]
    if origin in (Union, types.UnionType):
        inner = next(part for part in get_args(kind) if part is not type(None))
        return None if value is None else _built(inner, value, where)
    if origin is list:
        if not isinstance(value, list):
            raise TypeError(f"{where.rstrip('.')} must be an array")
        return [_built(get_args(kind)[0], item, where) for item in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"{where.rstrip('.')} must be an object")
        return {key: _built(get_args(kind)[1], item, where) for key, item in value.items()}
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where.rstrip('.')} cannot be {value!r}")
        return value
    if value is None and kind is float:
        return float("nan")  # JSON has no word for it
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{where.rstrip('.')} cannot be {value!r}")
    return value
