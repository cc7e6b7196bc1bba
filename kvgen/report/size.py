"""A model's sizes for people, for spreadsheets and for programs. Imports no torch."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvgen.measure.size_records import LayerGroup, Size
from kvgen.report.document import to_json
from kvgen.report.units import bytes_text, visible

SCHEMA = "kvgen.size/1"
_WIDTH = 80
_LAYER_HEADS = ("kind", "layers", "KV heads", "dims", "window", "per token", "fixed")


def text(size: Size) -> str:
    """For a terminal, 80 columns."""
    lines = [*_head(size), "", *_columns(_LAYER_HEADS, [_layer(g) for g in size.groups]), ""]
    for line in _formulas(size):
        lines += _wrapped(line)
    lines += ["", *_columns(*_table(size))]
    fits = _fits(size)
    if fits:
        lines += ["", *fits]
    rest = _remarks(size)
    if rest:
        lines += [""]
    for line in rest:
        lines += _wrapped(line)
    return "\n".join(visible(line) for line in lines) + "\n"


def markdown(size: Size) -> str:
    """For documents and pull requests."""
    lines = [f"### kvgen size: {_cell(size.model)}", ""]
    lines += [f"{_cell(line)}  " for line in _head(size)]
    lines += ["", *_rows(_LAYER_HEADS, [_layer(group) for group in size.groups]), ""]
    lines += [f"`{line}`  " for line in _formulas(size)]
    lines += ["", *_rows(*_table(size))]
    bullets = [f"- {_cell(line)}" for line in (*_fits(size), *_remarks(size))]
    return "\n".join([*lines, *([""] if bullets else []), *bullets]) + "\n"


def csv_text(size: Size) -> str:
    """One line per context, batch and dtype; plain numbers."""
    out = io.StringIO()
    common = {
        "model": size.model,
        "cache": size.cache,
        "weight_bytes": size.weight_bytes,
        "bytes_per_token": size.bytes_per_token,
        "fixed_bytes": size.fixed_bytes,
    }
    rows = [common | asdict(row) for row in size.rows]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def size_document(size: Size) -> dict[str, Any]:
    """The record under its schema's name; the fields are described in ``docs/json.md``."""
    return {"schema": SCHEMA} | asdict(size)


def json_text(size: Size) -> str:
    """One document."""
    return to_json(size_document(size), indent=2) + "\n"


EXPORTERS: dict[str, Callable[[Size], str]] = {
    "text": text,
    "json": json_text,
    "csv": csv_text,
    "markdown": markdown,
}


def _wrapped(line: str) -> list[str]:
    """Within the width; a number stays beside its unit."""
    joined = re.sub(r"(\([\d.,]+) ", "\\1\N{NO-BREAK SPACE}", line)
    wrapped = textwrap.wrap(joined, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in wrapped]


def _head(size: Size) -> list[str]:
    limit = f", at most {size.context_limit:,} tokens" if size.context_limit else ""
    lines = [f"{size.model}: {size.model_type}, {size.dtype}{limit}"]
    if size.ranks > 1:
        lines.append(f"one rank of {size.ranks}")
    if size.weight_bytes is None:
        lines.append(f"weights: {size.weight_source}")
    else:
        lines.append(f"weights: {bytes_text(size.weight_bytes)} ({size.weight_source})")
    if size.cache != "step":
        lines.append(f"cache: {size.cache}")
    return lines


def _layer(group: LayerGroup) -> list[str]:
    dims = str(group.key_dim)
    if group.value_dim != group.key_dim:
        dims = f"{group.key_dim} + {group.value_dim}"
    pairs = group.num_key_value_heads > 0
    return [
        group.kind,
        f"{group.layers}",
        f"{group.num_key_value_heads}" if pairs else "-",
        dims if pairs else "-",
        f"{group.window:,}" if group.window else "-",
        bytes_text(group.bytes_per_token) if group.bytes_per_token else "-",
        "unknown"
        if group.fixed_bytes is None
        else bytes_text(group.fixed_bytes)
        if group.fixed_bytes
        else "-",
    ]


def _formulas(size: Size) -> list[str]:
    found = [f"{g.formula} ({bytes_text(g.bytes_per_token)})" for g in size.groups if g.formula]
    if len(found) > 1:
        found.append(f"together {size.bytes_per_token:,} bytes per token")
    if not found:
        found.append("no pairs: nothing grows with the context")
    if size.bytes_per_token_later != size.bytes_per_token:
        later = size.bytes_per_token_later
        found.append(
            f"once windows are full {later:,} bytes per token"
            if later
            else "once windows are full it does not grow"
        )
    if size.fixed_bytes:
        found.append(f"and {size.fixed_bytes:,} bytes per sequence of any length")
    return found


def _table(size: Size) -> tuple[list[str], list[list[str]]]:
    """Contexts down, batches and dtypes across."""
    columns = list(dict.fromkeys((row.batch, row.kv_dtype) for row in size.rows))
    batches = len({batch for batch, _ in columns}) > 1
    heads = ["context", *((f"{n} x {dtype}" if batches else dtype) for n, dtype in columns)]
    budget = size.budget_bytes is not None
    dtypes = list(dict.fromkeys(row.kv_dtype for row in size.rows))
    if budget:
        heads += [f"batch that fits, {dtype}" for dtype in dtypes]
    cells = {(row.context, row.batch, row.kv_dtype): row for row in size.rows}
    lines = []
    for context in dict.fromkeys(row.context for row in size.rows):
        line = [f"{context:,}"]
        line += [bytes_text(cells[(context, *column)].kv_bytes) for column in columns]
        if budget:
            first = columns[0][0]
            line += [f"{cells[(context, first, dtype)].largest_batch:,}" for dtype in dtypes]
        lines.append(line)
    return heads, lines


def _fits(size: Size) -> list[str]:
    lines = []
    for fit in size.fits:
        where = "the model's limit" if fit.limited_by == "model" else "memory is full"
        if fit.longest_context == 0:
            lines.append(f"{fit.kv_dtype}: nothing fits beside the weights")
            continue
        lines.append(
            f"{fit.kv_dtype}: up to {fit.longest_context:,} tokens ({where}), "
            f"cache {bytes_text(fit.kv_bytes)}"
        )
        lines.append(
            f"  + about {bytes_text(fit.working_bytes)} to forward {size.prefill_chunk:,} tokens "
            "at a time (an estimate)"
        )
    if lines and size.budget_bytes is not None:
        lines.insert(0, f"within {bytes_text(size.budget_bytes)}, weights included:")
    return lines


def _remarks(size: Size) -> list[str]:
    lines = [
        f"{other.name}: {other.bytes_per_token:,} bytes per token"
        + (" <- what kvgen stores" if other.stored_here else "")
        for other in size.alternatives
    ]
    return lines + size.notes


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, the first column to the left; columns beyond the width follow below."""
    table = [list(heads), *map(list, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
    blocks: list[list[int]] = [[0]]
    for i in range(1, len(heads)):
        if sum(widths[j] + 2 for j in (*blocks[-1], i)) - 2 > _WIDTH and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(i)
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        for line in table:
            cells = [line[i].rjust(widths[i]) if i else line[i].ljust(widths[i]) for i in block]
            lines.append("  ".join(cells).rstrip())
    return lines


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return ["| " + " | ".join(map(_cell, line)) + " |" for line in (heads, rule, *rows)]


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|")
