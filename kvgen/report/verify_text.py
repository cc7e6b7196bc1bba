"""The checks of one model as a table of fixed columns, row by row as they finish, and as data."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from kvgen.measure.checks import Outcome
from kvgen.measure.verification import Verification
from kvgen.report.units import counted, visible

SCHEMA = "kvgen.verify/1"
_WIDTH = 80
_COLUMNS = "{:<31} {:<15} {:>12} {:>12}"


def verification_document(record: Verification) -> dict[str, Any]:
    """The whole record under its schema's name; the fields are described in ``docs/json.md``."""
    return {"schema": SCHEMA} | asdict(record)


def head_lines(record: Verification) -> list[str]:
    """What is verified, and the table's head."""
    model, where = record.model, record.environment
    layers = f"{counted(model.num_hidden_layers, 'layer')}"
    return [
        visible(f"{model.name} ({model.model_type}, {layers}): {where.dtype} on {where.device}"),
        f"against one uncached forward over {record.tokens} tokens; "
        f"equal within |Δlogit| {record.tolerance:.1e}",
        "",
        _COLUMNS.format("check", "result", "max |Δlogit|", "first wrong").rstrip(),
    ]


def outcome_lines(outcome: Outcome) -> list[str]:
    """One check: its row, and its detail below."""
    difference = outcome.max_abs_logit_difference
    row = _COLUMNS.format(
        outcome.check,
        outcome.status.upper() if outcome.status == "fail" else outcome.status,
        "" if difference is None else f"{difference:.1e}",
        "" if outcome.position is None else f"position {outcome.position}",
    )
    detail = textwrap.wrap(visible(outcome.detail), _WIDTH - 4)
    return [row.rstrip(), *("    " + line for line in detail)]


def tail_line(record: Verification) -> str:
    """How many checks ended how."""
    counts = {
        status: sum(outcome.status == status for outcome in record.outcomes)
        for status in ("pass", "fail", "not applicable")
    }
    return "{} passed, {} failed, {} not applicable".format(*counts.values())
