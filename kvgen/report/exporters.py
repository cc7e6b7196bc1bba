"""One small exporter per format, all over the same records."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvgen.errors import UsageError
from kvgen.measure.comparison_records import Comparison
from kvgen.measure.tally import decode_steps
from kvgen.report.chart import Series, chart
from kvgen.report.document import to_json
from kvgen.report.rows import (
    LEGEND,
    TEXT_HEADS,
    Grid,
    Titled,
    disagreements,
    grids,
    header,
    step_grid,
    verdict,
)
from kvgen.report.saved import SCHEMA, comparison_document
from kvgen.report.units import visible
from kvgen.report.where_time_went import explanation

Exporter = Callable[[Sequence[Titled]], str]
_WIDTH = 80
_GAP = 2
_CELL = 22  # the longest label shown whole


def text(runs: Sequence[Titled], steps: bool = False, charts: bool = True) -> str:
    """For people at a terminal: 80 columns, no colour."""
    lines = [part for run in runs for line in header(run) for part in textwrap.wrap(line, _WIDTH)]
    for grid in grids(runs):
        lines += ["", *_aligned(grid)]
    lines += textwrap.wrap(LEGEND, _WIDTH)
    for run in runs:
        title = [f"{visible(run.title)}:"] if len(runs) > 1 else []
        if steps:
            lines += ["", *title, *_aligned(step_grid(run))]
        if charts:
            drawn = chart(series(run.record), _WIDTH)
            lines += ["", *title, *drawn] if drawn else []
        for heading, sentences in remarks(run.record):
            lines += ["", *title, heading, *_wrapped(sentences)]
    return "\n".join(lines) + "\n"


def markdown(runs: Sequence[Titled]) -> str:
    """For pull requests and job summaries."""
    first = runs[0].record
    name = first.model.name if len(runs) == 1 else f"{len(runs)} runs"
    lines = [f"### kvgen compare: {_cell(name)}", ""]
    lines += [f"{_cell(line)}  " for run in runs for line in header(run)]
    for grid in grids(runs):
        lines += ["", _line(grid.heads)]
        lines.append(_line(["---" if head in TEXT_HEADS else "---:" for head in grid.heads]))
        lines += [_line(row) for row in grid.rows]
    lines += ["", LEGEND]
    for run in runs:
        title = f" ({_cell(run.title)})" if len(runs) > 1 else ""
        for heading, sentences in remarks(run.record):
            lines += ["", f"**{heading}**{title}", *(f"- {_cell(item)}" for item in sentences)]
    return "\n".join(lines) + "\n"


def json_text(runs: Sequence[Titled]) -> str:
    """One document: a comparison's, or several under their titles."""
    if len(runs) == 1:
        return to_json(comparison_document(runs[0].record), indent=2) + "\n"
    listed = [{"title": run.title} | comparison_document(run.record) for run in runs]
    return to_json({"schema": "kvgen.report/1", "runs": listed}, indent=2) + "\n"


def jsonl(runs: Sequence[Titled]) -> str:
    """A line for the run, one per finished row, one for the result."""
    return "".join(
        to_json(line) + "\n"
        for run in runs
        for line in json_lines(run.record, from_row=0, end=True)
    )


def json_lines(record: Comparison, from_row: int, end: bool) -> list[dict[str, Any]]:
    """The lines that a record adds after ``from_row`` rows; together they hold all of it."""
    document = comparison_document(record)
    late = ("complete", "fits", "gates", "warnings", "notes")
    lines: list[dict[str, Any]] = []
    if from_row == 0:
        early = {k: v for k, v in document.items() if k not in (*late, "rows", "runs")}
        lines.append({"schema": SCHEMA, "type": "run"} | early)
    for row in document["rows"][from_row:]:
        runs = [run for run in document["runs"] if run["depth"] == row["depth"]]
        lines.append({"type": "row"} | row | {"runs": runs})
    if end:
        lines.append({"type": "result"} | {name: document[name] for name in late})
    return lines


def csv_text(runs: Sequence[Titled]) -> str:
    """One line per depth and contestant, plain numbers in seconds and bytes."""
    out = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for run in runs:
        for fields in _csv_rows(run):
            if writer is None:
                writer = csv.DictWriter(out, list(fields), lineterminator="\n")
                writer.writeheader()
            writer.writerow(fields)
    return out.getvalue()


EXPORTERS: dict[str, Exporter] = {
    "text": text,
    "json": json_text,
    "jsonl": jsonl,
    "csv": csv_text,
    "markdown": markdown,
}
_SUFFIXES = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".md": "markdown",
    ".markdown": "markdown",
}


def exporter_for(path: Path) -> Exporter:
    """The exporter that a file's suffix means. Raises ``UsageError`` for an unknown one."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"cannot tell the format of {path}; end it in {', '.join(_SUFFIXES)}")
    return EXPORTERS[_SUFFIXES[path.suffix.lower()]]


def series(record: Comparison) -> list[Series]:
    """Median latency against position for every contestant, prefill left out."""
    names = [facts.name for facts in record.contestants]
    return [Series(visible(name), *decode_steps(record, name)) for name in names]


def remarks(record: Comparison) -> list[tuple[str, list[str]]]:
    """Headed lists of sentences; a list that would be empty is left out."""
    gates = [("ok: " if gate.passed else "FAILED: ") + gate.message for gate in record.gates]
    parts = [
        ("Agreement", disagreements(record)),
        ("Where the time went", [] if record.broken else explanation(record)),
        ("Gates", gates),
        ("Do not trust blindly", record.warnings),
        ("Notes", record.notes),
    ]
    # Saved results come from anyone, so their words are made harmless as well.
    return [(heading, [visible(item) for item in items]) for heading, items in parts if items]


def _csv_rows(run: Titled) -> list[dict[str, object]]:
    record = run.record
    dtypes = {facts.name: facts.dtype for facts in record.contestants}
    rows: list[dict[str, object]] = []
    for row in record.rows:
        for item in row.results:
            fields: dict[str, object] = {"run": run.title, "model": record.model.name}
            fields |= {
                "random_weights": record.random_weights,
                "threads": record.environment.threads,
            }
            fields |= {"depth": row.depth, "prompt_tokens": row.prompt_tokens}
            fields |= {"new_tokens": record.new_tokens, "contestant": item.contestant}
            fields |= {"dtype": dtypes[item.contestant]}
            for name in ("prefill_s", "ttft_s", "tpot_s"):
                value = getattr(item, name)
                fields[name] = value.median if value else None
                fields[f"{name[:-2]}_spread_s"] = value.spread if value else None
            for name in ("tokens_per_s", "step_p95_s", "kv_bytes_peak", "kv_bytes_allocated"):
                fields[name] = getattr(item, name)
            for name in ("forwarded_tokens", "reprocessed_tokens", "bandwidth_share"):
                fields[name] = getattr(item, name)
            fields["speedup"] = item.speedup.value if item.speedup else None
            fields["speedup_spread"] = item.speedup.spread if item.speedup else None
            fields["break_even_position"] = item.break_even_position
            found = item.agreement
            fields["verdict"] = found.verdict if found else verdict(item)
            for name in (
                "max_abs_logit_difference",
                "mean_abs_logit_difference",
                "mean_probability_drop",
            ):
                fields[name] = getattr(found, name) if found else None
            first = found.first_difference if found else None
            fields["first_difference_position"] = first.position if first else None
            rows.append(fields)
    return rows


def _aligned(grid: Grid) -> list[str]:
    """Columns padded to their widest cell, numbers to the right.

    Columns that do not fit follow below, behind the same labels.
    """
    table = [[_short(cell) for cell in row] for row in (grid.heads, *grid.rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(grid.heads))]
    labels = list(range(grid.labels))
    blocks = [list(labels)]
    for column in range(grid.labels, len(grid.heads)):
        wider = [*blocks[-1], column]
        fits = sum(widths[c] + _GAP for c in wider) - _GAP <= _WIDTH
        if fits or len(blocks[-1]) == len(labels):
            blocks[-1] = wider
        else:
            blocks.append([*labels, column])
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        for row in table:
            cells = [
                row[c].ljust(widths[c]) if grid.heads[c] in TEXT_HEADS else row[c].rjust(widths[c])
                for c in block
            ]
            lines.append((" " * _GAP).join(cells).rstrip())
    return lines


def _short(cell: str) -> str:
    return cell if len(cell) <= _CELL else cell[: _CELL - 1] + "…"


def _wrapped(sentences: Sequence[str]) -> list[str]:
    lines = []
    for sentence in sentences:
        lines += textwrap.wrap(sentence, _WIDTH - 2, initial_indent="- ", subsequent_indent="  ")
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: str) -> str:
    """Text that Markdown shows as it is."""
    escaped = visible(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return escaped.replace("`", "\\`")
