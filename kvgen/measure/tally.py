"""From raw samples to results: pure arithmetic over records. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.measure.comparison_records import (
    Agreement,
    Communication,
    Comparison,
    CostFit,
    Result,
    Row,
    Run,
)
from kvgen.measure.stats import break_even, fit_line, median, percentile, ratio, summary, tpot, ttft

_UNSTEADY = 0.1  # a spread above this part of the median says that something else was running


def result(
    contestant: str,
    runs: Sequence[Run],
    tokenize_s: float,
    needed_tokens: int,
    agreement: Agreement | None,
    bytes_read: int | None = None,
    bandwidth: float | None = None,
) -> Result:
    """One contestant at one depth, from its runs, without what needs the reference.

    ``needed_tokens`` is how many tokens had to be forwarded at least: the prompt and every new
    token but the last.
    """
    firsts = [run.latencies_s[0] for run in runs if run.latencies_s]
    means = [mean for run in runs if (mean := tpot(run.latencies_s)) is not None]
    later = [latency for run in runs for latency in run.latencies_s[1:]]
    per_token = summary(means)
    steps = [median(list(step)) for step in zip(*(run.latencies_s for run in runs), strict=True)]
    forwarded = sum(runs[0].forwarded_tokens) if runs else 0
    share = None
    if bytes_read is not None and bandwidth and len(steps) > 1 and steps[-1] > 0:
        share = bytes_read / steps[-1] / bandwidth
    return Result(
        contestant=contestant,
        prefill_s=summary(firsts),
        ttft_s=summary([t for run in runs if (t := ttft(tokenize_s, run.latencies_s)) is not None]),
        tpot_s=per_token,
        tokens_per_s=1 / per_token.median if per_token and per_token.median > 0 else None,
        step_s=steps,
        step_p95_s=percentile(later, 95) if later else None,
        kv_bytes_peak=max((run.kv_bytes_used for run in runs), default=0),
        kv_bytes_allocated=max((run.kv_bytes_allocated for run in runs), default=0),
        forwarded_tokens=forwarded,
        reprocessed_tokens=max(0, forwarded - needed_tokens),
        bytes_read=bytes_read,
        bandwidth_share=share,
        agreement=agreement,
        speedup=None,
        prefill_speedup=None,
        break_even_position=None,
        communication=_communication(runs),
    )


def _communication(runs: Sequence[Run]) -> Communication | None:
    """Of the decode steps; ``None`` where there are none, or no ranks."""
    spent = [one for run in runs for one in (run.communication or [])[1:]]
    took = sum(sum(run.latencies_s[1:]) for run in runs if run.communication)
    if not spent or not took:
        return None
    share = sum(one.seconds for one in spent) / took
    each = median([one.seconds for one in spent])
    return Communication(each, share, spent[-1].collectives, spent[-1].wire_bytes)


def against_reference(results: list[Result], first_position: int) -> None:
    """Fill in what compares a row's results with the first: speed-ups, and where it paid.

    Nothing where the verdict is ``broken``: a faster wrong answer is no speed-up.
    """
    reference = results[0]
    for other in results[1:]:
        if other.agreement is None or other.agreement.verdict == "broken":
            continue
        other.speedup = ratio(other.tpot_s, reference.tpot_s)
        other.prefill_speedup = ratio(other.prefill_s, reference.prefill_s)
        step = break_even(reference.step_s, other.step_s)
        other.break_even_position = None if step is None else first_position + step


def decode_steps(comparison: Comparison, contestant: str) -> tuple[list[int], list[float]]:
    """Positions and median latencies of a contestant's decode steps, over all rows."""
    positions: list[int] = []
    seconds: list[float] = []
    for row in comparison.rows:
        first = row.depth + row.prompt_tokens
        for item in row.results:
            if item.contestant == contestant:
                positions += [first + step for step in range(1, len(item.step_s))]
                seconds += item.step_s[1:]
    return positions, seconds


def fits(comparison: Comparison) -> list[CostFit]:
    """How every contestant's step grows with the tokens before it, over all rows."""
    bandwidth = comparison.environment.bandwidth_bytes_per_s
    found = []
    for facts in comparison.contestants:
        xs, ys = decode_steps(comparison, facts.name)
        held = [
            (row.depth + row.prompt_tokens + max(0, len(item.step_s) - 1), item.kv_bytes_peak)
            for row in comparison.rows
            for item in row.results
            if item.contestant == facts.name
        ]
        per_token = None if facts.kind == "no-cache" else _bytes_per_token(held)
        floor = per_token / bandwidth if per_token is not None and bandwidth else None
        found.append(CostFit(facts.name, fit_line(xs, ys), per_token, floor))
    return found


def _bytes_per_token(held: list[tuple[int, int]]) -> int | None:
    """Bytes that each further token adds, from (tokens, bytes) at the ends of the rows."""
    if not held:
        return None
    (few, small), (many, large) = min(held), max(held)
    if many == few:
        return large // many if many else None
    return (large - small) // (many - few)


def unsteady(rows: Sequence[Row]) -> list[str]:
    """A line for every TPOT whose spread says that it cannot be trusted."""
    lines = []
    for row in rows:
        for item in row.results:
            per_token = item.tpot_s
            if per_token and per_token.spread > _UNSTEADY * per_token.median:
                lines.append(
                    f"{item.contestant} at depth {row.depth:,}: runs differ by "
                    f"±{per_token.spread / per_token.median:.0%}, so do not trust small differences"
                )
    return lines
