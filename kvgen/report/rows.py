"""A comparison's results as rows of cells: the one table behind text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvgen.measure.comparison_records import Comparison, Result
from kvgen.measure.stats import Summary
from kvgen.report.units import (
    bytes_text,
    counted,
    factor_with_spread,
    seconds_text,
    seconds_with_spread,
    visible,
)

TEXT_HEADS = ("run", "contestant")
"""Columns of words; all others hold numbers."""
LEGEND = "speed-up: its TPOT over kvgen's; re-run: tokens it forwarded more than once"


class Titled(NamedTuple):
    """A comparison and what tells it from others beside it; empty when it stands alone."""

    title: str
    record: Comparison


Cells = Callable[[Result], list[str]]


class Grid(NamedTuple):
    """A table: column heads, rows of cells. The leading ``labels`` columns tell rows apart."""

    heads: list[str]
    rows: list[list[str]]
    labels: int


def grids(runs: Sequence[Titled]) -> list[Grid]:
    """Two tables: how long it took, and what it bought at which price."""
    times = ["prefill", "TTFT", "TPOT", "tokens/s"]
    gains = ["speed-up", "verdict", "max|Δ|", "peak KV", "re-run"]
    return [_grid(runs, times, _time_cells), _grid(runs, gains, _gain_cells)]


def step_grid(run: Titled) -> Grid:
    """Median latency of every step, one column per contestant."""
    names = [visible(facts.name) for facts in run.record.contestants]
    rows = []
    for row in run.record.rows:
        for step, token in enumerate(row.new_ids):
            cells = [
                seconds_text(item.step_s[step]) if step < len(item.step_s) else "-"
                for item in row.results
            ]
            position = row.depth + row.prompt_tokens + step
            rows.append([str(step), f"{position:,}", str(token), *cells])
    return Grid(["step", "position", "id", *names], rows, 3)


def header(run: Titled) -> list[str]:
    """What was measured, where, and how."""
    record, where = run.record, run.record.environment
    name = visible(record.model.name) + (" (random weights)" if record.random_weights else "")
    title = f"{visible(run.title)}: " if run.title else ""
    prompts = sorted({row.prompt_tokens for row in record.rows})
    prompt = " or ".join(f"{count:,}" for count in prompts) or "no"
    turns = "one run" if record.repetitions == 1 else f"{record.repetitions} runs"
    turns = turns if record.complete else f"at most {turns}"
    lines = [
        f"{title}{name}, {where.dtype} on {where.device}, {counted(where.threads, 'thread')}",
        f"{prompt} prompt tokens and {record.new_tokens:,} new ones, the same for all; "
        f"{turns} each, in turn",
    ]
    return lines if record.complete else [*lines, "NOT COMPLETE"]


def _grid(runs: Sequence[Titled], heads: list[str], cells: Cells) -> Grid:
    several = len(runs) > 1
    swept = any(len(run.record.depths) > 1 for run in runs)
    labels = (["run"] if several else []) + (["depth"] if swept or several else []) + ["contestant"]
    rows = []
    for run in runs:
        for row in run.record.rows:
            for item in row.results:
                label = [visible(run.title)] if several else []
                label += [f"{row.depth:,}"] if swept or several else []
                rows.append([*label, visible(item.contestant), *cells(item)])
    return Grid(labels + heads, rows, len(labels))


def _time_cells(item: Result) -> list[str]:
    rate = "-" if item.tokens_per_s is None else f"{item.tokens_per_s:.1f}"
    return [_median(item.prefill_s), _median(item.ttft_s), spread(item.tpot_s), rate]


def _median(value: Summary | None) -> str:
    return "-" if value is None else seconds_text(value.median)


def spread(value: Summary | None) -> str:
    """Median and spread; a single sample has no spread."""
    if value is None:
        return "-"
    if value.count < 2:
        return seconds_text(value.median)
    return seconds_with_spread(value.median, value.spread)


def _gain_cells(item: Result) -> list[str]:
    return [
        speedup(item),
        verdict(item),
        "-" if item.agreement is None else f"{item.agreement.max_abs_logit_difference:.0e}",
        bytes_text(item.kv_bytes_peak),
        f"{item.reprocessed_tokens:,}",
    ]


def speedup(item: Result) -> str:
    """How much faster the reference is; nothing without a proof that both computed the same."""
    if item.speedup is None:
        return "-"
    return factor_with_spread(item.speedup.value, item.speedup.spread)


def verdict(item: Result) -> str:
    """One word, loud where it must be; a dash for what an interruption left unmeasured."""
    if item.agreement is None:
        return "-" if item.prefill_s is None else "reference"
    found = item.agreement.verdict
    return found.upper() if found == "broken" else found


def disagreements(record: Comparison) -> list[str]:
    """A line for every contestant that is not exact, or would have chosen another token."""
    lines = []
    for row in record.rows:
        for item in row.results:
            found = item.agreement
            if found is None or (found.first_difference is None and found.verdict == "exact"):
                continue
            line = f"{item.contestant} at depth {row.depth:,} is {verdict(item)}: "
            first = found.first_difference
            if first is None:
                line += "the same tokens, but "
            else:
                line += (
                    f"first other token at position {first.position:,} "
                    f"(id {first.contestant_id} for {first.reference_id}), where the likeliest two "
                    f"lie {first.margin:.1e} apart and logits differ by "
                    f"{first.abs_logit_difference:.1e}; over all steps "
                )
            lines.append(
                f"{line}logits differ by up to {found.max_abs_logit_difference:.1e}, where "
                f"{found.tolerance:.1e} is accepted; the reference's tokens lose "
                f"{100 * found.mean_probability_drop:.2g} points of probability on average"
            )
    return lines
