"""A generation's record as a table and a few lines of text for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvgen.measure.environment import busy
from kvgen.measure.records import Compilation, Generation, RankShares, Step
from kvgen.report.receipt import receipt_lines
from kvgen.report.units import bytes_text, counted, seconds_text, visible

_FIRST_ROWS = 5
_LAST_ROWS = 3
_MIDDLE_ROWS = 6
_TOKEN_WIDTH = 16
_ROOM = 200  # columns; more than the table ever takes

_ENDINGS = {
    "length": "as many as asked for",
    "end": "the model ended its text",
    "stop": "stop string",
    "interrupted": "interrupted",
    "memory": "out of memory",
}


def print_generation(record: Generation, console: Console, trace: bool = False) -> None:
    """Print the table, its totals and the check. ``trace`` shows every step."""
    for line in _header(record):
        console.print(Text(visible(line)))
    if record.steps:
        table = _table(record, trace)
        # A terminal that is too narrow breaks the lines itself; no number is cut short.
        room = console.options.update(width=_ROOM)
        table.width = console.measure(table, options=room).maximum
        console.print(table, crop=False)
    for line in _footer(record):
        console.print(Text(visible(line)))


def shown_steps(count: int) -> list[int]:
    """Which of ``count`` steps to show: the first, the last, and evenly spaced ones between."""
    if count <= _FIRST_ROWS + _MIDDLE_ROWS + _LAST_ROWS:
        return list(range(count))
    begin, end = _FIRST_ROWS, count - _LAST_ROWS
    spacing = (end - begin) / (_MIDDLE_ROWS + 1)
    middle = {begin + round(spacing * k) for k in range(1, _MIDDLE_ROWS + 1)}
    return sorted({*range(begin), *middle, *range(end, count)})


def _header(record: Generation) -> list[str]:
    model, where = record.model, record.environment
    ending = _ENDINGS[record.finish_reason]
    first = f"{model.name}: {where.dtype} on {where.device}, {counted(where.threads, 'thread')}"
    if record.ranks is not None:
        first += f", rank 0 of {record.ranks.size} over {record.ranks.backend}"
    second = (
        f"{counted(record.prompt_tokens, 'prompt token')}, {len(record.steps):,} new ({ending})"
    )
    if model.kv_bytes_per_token is None:
        second += ", no KV cache"
    else:
        second += f", {bytes_text(model.kv_bytes_per_token)} of KV cache per token"
        last = record.steps[-1] if record.steps else None
        # Stored more compactly only when a block is full.
        if last and last.kv_bytes_used > last.cached_tokens * model.kv_bytes_per_token:
            second += " in the long run"
    receipt = receipt_lines(record.reuse, record.kept) if record.reuse else []
    return [first, second, *receipt]


def _table(record: Generation, trace: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1), header_style="bold")
    table.add_column("step", justify="right")
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=_TOKEN_WIDTH)
    table.add_column("latency", justify="right")
    table.add_column("KV cache", justify="right")
    table.add_column("without cache", justify="right")
    gains = _gains_shown(record)
    if gains:
        table.add_column("gain", justify="right")
    count = len(record.steps)
    for index in range(count) if trace else shown_steps(count):
        table.add_row(*_row(record.steps[index], gains))
    table.add_section()
    table.add_row(*_total_row(record, gains), style="bold")
    return table


def _gains_shown(record: Generation) -> bool:
    """A gain needs the proof that both sides computed the same."""
    return record.check is not None and record.check.verdict != "broken"


def _row(step: Step, gains: bool) -> list[str | Text]:
    cells: list[str | Text] = [
        str(step.index),
        Text(visible(step.token)),
        seconds_text(step.latency_s),
        bytes_text(step.kv_bytes_used),
        _recompute_cell(step),
    ]
    if gains:
        cells.append(_gain(step.recompute_s, step.latency_s))
    return cells


def _recompute_cell(step: Step) -> str:
    if step.recompute_s is None:
        return "-"
    mark = "~" if step.recompute_source == "fitted" else ""
    return mark + seconds_text(step.recompute_s)


def _gain(without_s: float | None, with_s: float) -> str:
    return "-" if without_s is None or not with_s else f"{without_s / with_s:.1f}x"


def _total_row(record: Generation, gains: bool) -> list[str | Text]:
    latency = sum(step.latency_s for step in record.steps)
    recompute_s = record.totals.recompute_s if record.totals else None
    fitted = any(step.recompute_source == "fitted" for step in record.steps)
    cells: list[str | Text] = [
        "total",
        counted(len(record.steps), "token"),
        seconds_text(latency),
        bytes_text(record.steps[-1].kv_bytes_used),
        "-" if recompute_s is None else ("~" if fitted else "") + seconds_text(recompute_s),
    ]
    if gains:
        cells.append(_gain(recompute_s, latency))
    return cells


def _footer(record: Generation) -> list[str]:
    lines = []
    totals = record.totals
    if totals is not None:
        parts = [f"prefill {seconds_text(totals.prefill_s)}", f"TTFT {seconds_text(totals.ttft_s)}"]
        if totals.tpot_s:
            rate = f"{1 / totals.tpot_s:.1f} tokens/s"
            parts.append(f"TPOT {seconds_text(totals.tpot_s)} ({rate})")
        parts.append(f"load {seconds_text(totals.load_s)}")
        lines.append(", ".join(parts))
    if record.compilation is not None:
        lines.append(_compilation_line(record.compilation))
    lines += _memory_lines(record)
    if any(step.recompute_source == "fitted" for step in record.steps):
        measured = sum(step.recompute_source == "measured" for step in record.steps)
        lines.append(f"~ fitted to {measured} measured positions")
    warning = busy(record.environment)
    if warning is not None:
        lines.append(warning)
    lines += record.notes
    lines.append(check_line(record))
    return lines


def _compilation_line(found: Compilation) -> str:
    done = f"{found.compiled} of them compiled now" if found.compiled else "compiled before"
    ready = seconds_text(found.compile_s)
    return f"compiled step: {counted(found.programs, 'program')}, {done}, ready in {ready}"


def _memory_lines(record: Generation) -> list[str]:
    lines = []
    if record.cached and record.steps:
        last = record.steps[-1]
        formula = record.kv_bytes_formula
        if formula is None:
            beside = "with no formula for this model's layers"
        else:
            beside = f"{'=' if last.kv_bytes_used == formula else 'but'} formula {formula:,}"
        lines.append(
            f"KV cache: {last.kv_bytes_used:,} bytes used {beside}, "
            f"{last.kv_bytes_allocated:,} allocated{_to_come(last)}"
        )
    if record.ranks is not None:
        lines += ranks_lines(record.ranks)
    shares = [s.bandwidth_share for s in record.steps[1:] if s.bandwidth_share is not None]
    bandwidth = record.environment.bandwidth_bytes_per_s
    if shares and bandwidth:
        lines.append(
            f"decode read at {sum(shares) / len(shares):.0%} of the measured memory bandwidth "
            f"({bandwidth / 1e9:.1f} GB/s)"
        )
    return lines


def ranks_lines(ranks: RankShares) -> list[str]:
    """What the ranks hold, each and together."""
    used, weights = ranks.kv_bytes_used, ranks.weight_bytes
    return [
        f"all {ranks.size} ranks: KV cache {sum(used):,} bytes used ({_each(used)}), "
        f"{sum(ranks.kv_bytes_allocated):,} allocated",
        f"weights {bytes_text(sum(weights))} ({_each(weights)})",
    ]


def _each(counts: list[int]) -> str:
    if len(set(counts)) == 1:
        return f"{counts[0]:,} each"
    return ", ".join(f"{count:,}" for count in counts)


def _to_come(step: Step) -> str:
    """What is allocated and not used are slots that following tokens will fill."""
    slack = step.kv_bytes_allocated - step.kv_bytes_used
    return f", {slack:,} of them for tokens to come" if slack > 0 else ""


def check_line(record: Generation) -> str:
    """What the check against the uncached forward found, in one line."""
    check, count = record.check, len(record.steps)
    if not record.cached:
        return "no cache in use: every step forwarded the whole prefix"
    if check is None:
        return "not checked against the uncached model"
    what = f"checked at {len(check.steps)} of {count} positions: "
    difference = f"max |Δlogit| {check.max_abs_logit_difference:.1e}"
    if check.verdict == "exact":
        return f"{what}identical, {difference}"
    if check.verdict == "tolerance":
        return (
            f"{what}same within {check.tolerance:.1e}, {difference}, but a near tie fell otherwise"
        )
    if check.verdict == "rescaled":
        return f"{what}differ by rotary rule, {difference}"
    if check.verdict == "lossy":
        accepted = check.lossy_tolerance
        limit = "" if accepted is None else f" where {accepted:.1e} is accepted"
        return (
            f"{what}lossy as --cache {record.cache} is, {difference}{limit}, "
            f"the same likeliest token at {check.same_tokens}"
        )
    return f"{what}BROKEN, {difference} where {check.tolerance:.1e} is accepted"
