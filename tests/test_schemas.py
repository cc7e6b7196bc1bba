"""The schemas of all documents: each field of a record is in them, with what it means."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jsonschema
import pytest

from kvgen.measure.batch_records import RowResult
from kvgen.measure.comparison_records import Comparison
from kvgen.measure.explanation import Explanation
from kvgen.measure.records import Generation
from kvgen.measure.size_records import Size
from kvgen.measure.turns import TurnRecord
from kvgen.measure.verification import Verification
from kvgen.report.document import schema

ROOT = Path(__file__).parent.parent
DOCUMENTS = {
    "batch-1": RowResult,
    "chat-1": TurnRecord,
    "compare-1": Comparison,
    "explain-1": Explanation,
    "generate-1": Generation,
    "size-1": Size,
    "verify-1": Verification,
}
# In documents and in no record: a name for what it is, and what follows from other fields.
ADDED = {"schema", "type", "computed", "ttft_s", "tpot_s"}


def objects(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The properties of each object that a part of a schema allows, itself or as an item."""
    if "properties" in part:
        yield part["properties"]
    for inner in [*part.get("oneOf", []), *([part["items"]] if "items" in part else [])]:
        yield from objects(inner)


def records(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint):
        yield hint  # type: ignore[misc]
    for inner in get_args(hint):
        yield from records(inner)


def parts(record: type, part: dict[str, Any]) -> Iterator[tuple[type, dict[str, Any]]]:
    """A record and all within it, each with its properties in the schema."""
    found = list(objects(part))
    assert found, record
    for properties in found:
        yield record, properties
        for name, hint in get_type_hints(record).items():
            for inner in records(hint):
                yield from parts(inner, properties[name])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_field_of_the_records_is_in_the_schema_with_a_meaning(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))
    for record, properties in parts(DOCUMENTS[name], schema(name)):
        names = {field.name for field in dataclasses.fields(record)}
        assert set(properties) - ADDED == names - ADDED, record
        assert all(one.get("description") for one in properties.values()), record


def test_the_description_of_the_document_is_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "describe-json"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0
