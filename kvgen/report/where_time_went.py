"""Where the time went, in words for someone who meets a KV cache for the first time."""

from __future__ import annotations

from kvgen.measure.comparison_records import Comparison, CostFit, Result, Row
from kvgen.report.units import bytes_text, seconds_text


def explanation(record: Comparison) -> list[str]:
    """Sentences with this run's own numbers; none for what was not measured."""
    rows = [row for row in record.rows if row.results and len(row.results[0].step_s) > 1]
    if not rows:
        return []
    deepest = max(rows, key=lambda row: row.depth)
    found = {fit.contestant: fit for fit in record.fits}
    reference = found.get(record.reference.name)
    sentences = [_one_step(record, deepest)]
    if reference is not None:
        sentences += _cached_growth(record, reference, deepest)
    for facts in record.contestants[1:]:
        if facts.kind == "no-cache":
            sentences += _uncached_growth(found.get(facts.name), deepest, facts.name)
    sentences += _exchanged(record, deepest)
    sentences += _paid(record, rows)
    return sentences


def _one_step(record: Comparison, row: Row) -> str:
    """What a cached step has to read, against what it took."""
    step = row.results[0]
    tokens = row.depth + row.prompt_tokens + len(row.new_ids) - 1
    pairs = step.kv_bytes_peak
    text = (
        f"With the cache, a step forwards one token. At {tokens:,} tokens it has to read "
        f"{bytes_text(record.reference.weight_bytes)} of weights and {bytes_text(pairs)} of stored "
        f"keys and values"
    )
    bandwidth = record.environment.bandwidth_bytes_per_s
    if bandwidth is None or step.bytes_read is None:
        return text + "."
    return (
        f"{text}: at the {bandwidth / 1e9:.0f} GB/s measured here that is at least "
        f"{seconds_text(step.bytes_read / bandwidth)}, and it took {seconds_text(step.step_s[-1])}."
    )


def _exchanged(record: Comparison, row: Row) -> list[str]:
    """What the ranks had to tell each other, in the reference's steps."""
    found, ranks = row.results[0].communication, record.ranks
    if found is None or ranks is None:
        return []
    return [
        f"Of a step {found.share:.0%} went to communication between the {ranks.size} ranks: "
        f"{seconds_text(found.step_s)} in {found.collectives:,} collectives, for which a rank "
        f"sends {bytes_text(found.wire_bytes)} over {ranks.backend}.",
        f"The cache is shared out by heads: {bytes_text(ranks.kv_bytes_used[0])} on each rank, "
        f"{bytes_text(sum(ranks.kv_bytes_used))} together.",
    ]


def _cached_growth(record: Comparison, fit: CostFit, row: Row) -> list[str]:
    """The boundary: every retained token is read again at every step."""
    if fit.line is None:
        return []
    slope, error = fit.line.slope, fit.line.slope_error
    floor = ""
    if fit.kv_bytes_per_token and fit.floor_s_per_token:
        floor = (
            f"reading its {bytes_text(fit.kv_bytes_per_token)} takes at least "
            f"{fit.floor_s_per_token * 1e9:,.0f} ns"
        )
    if not fit.line.is_clear:
        advice = "" if len(record.rows) > 1 else "; measure several depths, as --depth 0,1024,4096"
        return [
            f"How much each retained token adds to a step drowned in the scatter here "
            f"({slope * 1e9:,.0f} ± {error * 1e9:,.0f} ns per token"
            f"{'; ' + floor if floor else ''}){advice}."
        ]
    grown = f"Each retained token adds {slope * 1e9:,.0f} ± {error * 1e9:,.0f} ns to a cached step"
    tokens = row.depth + row.prompt_tokens + len(row.new_ids) - 1
    share = min(1.0, slope * tokens / row.results[0].step_s[-1])
    lines = [
        f"{grown}{' (' + floor + ')' if floor else ''}.",
        f"At {tokens:,} tokens attention over what is retained is about {share:.0%} of the step.",
    ]
    if fit.line.intercept > 0:
        lines[-1] = lines[-1][:-1] + (
            f"; near {fit.line.intercept / slope:,.0f} tokens it would be half. "
            "That is the boundary of what a cache can save."
        )
    return lines


def _uncached_growth(fit: CostFit | None, row: Row, name: str) -> list[str]:
    result = next((item for item in row.results if item.contestant == name), None)
    if result is None or not result.step_s:
        return []
    repeated = (
        f"Without a cache the whole prefix runs again at every step: {len(row.new_ids):,} new "
        f"tokens after {row.depth + row.prompt_tokens:,} made the model process "
        f"{result.reprocessed_tokens:,} tokens it had seen before"
    )
    if fit is None or fit.line is None or not fit.line.is_clear:
        return [repeated + "."]
    return [f"{repeated}, and each token more made every step {_per_token(fit)} longer."]


def _per_token(fit: CostFit) -> str:
    assert fit.line is not None
    return seconds_text(fit.line.slope)


def _paid(record: Comparison, rows: list[Row]) -> list[str]:
    """From where on the cache had cost less in total, prefill included."""
    sentences = []
    for row in rows:
        for result in row.results:
            if _kind(record, result) != "no-cache" or result.speedup is None:
                continue
            where = f"at depth {row.depth:,} " if len(rows) > 1 else ""
            if result.break_even_position is None:
                sentences.append(f"{where}caching had not paid for its prefill by the end.")
            else:
                after = result.break_even_position - row.depth - row.prompt_tokens + 1
                sentences.append(
                    f"{where}caching had paid for its prefill by position "
                    f"{result.break_even_position:,}, new token {after}."
                )
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def _kind(record: Comparison, result: Result) -> str:
    return next(f.kind for f in record.contestants if f.name == result.contestant)
