"""A generation's record as data: one JSON document, or JSON Lines while it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from kvgen.measure.records import Generation, Step

SCHEMA = "kvgen.generate/1"


def schema(name: str = "generate-1") -> dict[str, Any]:
    """The JSON Schema in ``schemas/`` of this name."""
    text = files("kvgen.report").joinpath(f"schemas/{name}.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def generation_document(record: Generation) -> dict[str, Any]:
    """The whole record under its schema's name; the fields are described in ``docs/json.md``."""
    return {"schema": SCHEMA} | asdict(record)


def run_line(record: Generation) -> dict[str, Any]:
    """The first JSON line: what runs, before any token."""
    fields = (
        *("model", "environment", "cached", "prompt_tokens", "max_new_tokens", "sampling"),
        "reuse",
    )
    document = asdict(record)
    return {"schema": SCHEMA, "type": "run"} | {name: document[name] for name in fields}


def step_line(step: Step) -> dict[str, Any]:
    """A JSON line for one step as it happens; recompute costs are not known yet."""
    line = asdict(step)
    del line["recompute_s"], line["recompute_source"]
    return {"type": "step"} | line


def result_line(record: Generation) -> dict[str, Any]:
    """The last JSON line: totals, check, and each step's recompute cost."""
    document = generation_document(record)
    early = set(run_line(record)) | {"prompt", "prompt_ids", "prefill_chunk", "steps"}
    recompute = [
        {"index": s.index, "recompute_s": s.recompute_s, "recompute_source": s.recompute_source}
        for s in record.steps
    ]
    late = {name: value for name, value in document.items() if name not in early}
    return {"type": "result"} | late | {"recompute": recompute}


def to_json(document: dict[str, Any], indent: int | None = None) -> str:
    """Strict JSON: never ``NaN``, which other readers refuse."""
    return json.dumps(_finite(document), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    """Numbers that JSON cannot hold become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value
