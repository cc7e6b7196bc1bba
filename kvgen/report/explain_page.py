"""An explanation as data and as one self-contained page: two renderings of one record.

The page carries the record as JSON and draws it with the script of ``templates/explain.html``; it
asks for nothing from anywhere.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from typing import Any

from kvgen.measure.explanation import Explanation
from kvgen.report.document import to_json

SCHEMA = "kvgen.explain/1"
_PLACE = "/*record*/null"
# Inside a script element these could end it, or a line of it.
_ESCAPES = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def explanation_document(record: Explanation) -> dict[str, Any]:
    """The whole record under its schema's name; the fields are described in ``docs/json.md``."""
    return {"schema": SCHEMA} | asdict(record)


def explanation_page(record: Explanation) -> str:
    """The page, with all text from the model and the user escaped."""
    template = files("kvgen.report").joinpath("templates/explain.html").read_text("utf-8")
    before, after = template.split(_PLACE)
    data = to_json(explanation_document(record)).translate(_ESCAPES)
    # A lone half of a surrogate pair is legal in JSON's escapes only.
    safe = data.encode("utf-8", "backslashreplace").decode("utf-8")
    return before + safe + after
