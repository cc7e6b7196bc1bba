"""The results of a batch: a JSON line for each prompt, and a few lines of text for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvgen.measure.batch_records import BatchSummary, RowResult
from kvgen.report.units import bytes_text, counted, seconds_text, visible

SCHEMA = "kvgen.batch/1"


def row_line(result: RowResult) -> dict[str, Any]:
    """One finished prompt under its schema's name; the fields are in ``docs/json.md``."""
    line = asdict(result)
    line["receipt"] |= {"computed": result.receipt.computed}
    return {"schema": SCHEMA} | line


def summary_lines(summary: BatchSummary) -> list[str]:
    """What the whole batch did and what sharing saved."""
    model, where = summary.model, summary.environment
    lines = [f"{model.name}: {where.dtype} on {where.device}, {counted(where.threads, 'thread')}"]
    counts = f"{counted(summary.prompts, 'prompt')}"
    if summary.already_finished:
        counts += f" ({summary.already_finished:,} more were finished before)"
    if summary.prompts:
        counts += f", {counted(summary.new_tokens, 'new token')} in {seconds_text(summary.wall_s)}"
    if summary.tokens_per_s is not None:
        counts += f": {summary.tokens_per_s:.1f} tokens/s, {_at_a_time(summary)}"
    lines.append(counts)
    if summary.prompts:
        lines.append(
            f"prompt tokens: {summary.prompt_tokens:,} submitted, {summary.reused_tokens:,} reused,"
            f" {summary.computed_tokens:,} computed"
        )
        if summary.saved_s:
            lines.append(
                f"prefill saved: about {seconds_text(summary.saved_s)}, as measured when stored"
            )
        lines.append(
            f"KV cache: at most {bytes_text(summary.kv_bytes_peak)} for rows and stored prefixes"
        )
    return [visible(line) for line in lines + summary.notes]


def _at_a_time(summary: BatchSummary) -> str:
    size = summary.batch_size
    return "one row at a time" if size == 1 else f"up to {size} rows at a time"
