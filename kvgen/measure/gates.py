"""Limits that a comparison must keep, for CI jobs. Every gate is evaluated; none stops another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvgen.errors import UsageError
from kvgen.measure.comparison_records import Comparison, Gate, Result, Row
from kvgen.measure.stats import Summary


@dataclass(frozen=True)
class GateOptions:
    """The limits asked for; ``None`` is no limit."""

    fail_under_speedup: float | None = None
    max_tpot_ms: float | None = None
    max_ttft_ms: float | None = None
    max_kv_bytes: int | None = None
    baseline: Comparison | None = None
    max_regression: float | None = None
    """A part: 0.1 is ten percent."""


def check_baseline(record: Comparison, baseline: Comparison) -> list[str]:
    """What makes the two hard to compare, for people.

    Raises ``UsageError`` for a baseline of another model, and when no depth of it is measured now.
    """
    then, now = baseline.model, record.model
    if (then.model_type, then.parameters) != (now.model_type, now.parameters):
        raise UsageError(
            f"the baseline is of {then.name} ({then.parameters:,} parameters) and this run of "
            f"{now.name} ({now.parameters:,}); hold a model against itself"
        )
    depths = {row.depth for row in baseline.rows}
    if not depths & set(record.depths):
        raise UsageError(
            f"the baseline has depths {sorted(depths)} and this run {record.depths}; "
            "none is in both, so there is nothing to hold against it"
        )
    pairs: list[tuple[str, object, object]] = [
        ("model", baseline.model.name, record.model.name),
        ("dtype", baseline.reference.dtype, record.reference.dtype),
        ("threads", baseline.environment.threads, record.environment.threads),
        ("processor", baseline.environment.cpu, record.environment.cpu),
        ("device", baseline.environment.device, record.environment.device),
        ("new tokens", baseline.new_tokens, record.new_tokens),
    ]
    return [
        f"the baseline has another {what}: {before}, now {after}"
        for what, before, after in pairs
        if before != after
    ]


def evaluate(record: Comparison, options: GateOptions) -> list[Gate]:
    """One gate per limit asked for, each over every depth; the worst depth counts."""
    found = []
    if options.fail_under_speedup is not None:
        found.append(_speedup(record, options.fail_under_speedup))
    if options.max_tpot_ms is not None:
        found.append(
            _most(record, "--max-tpot-ms", options.max_tpot_ms, "TPOT", "ms", _ms("tpot_s"))
        )
    if options.max_ttft_ms is not None:
        found.append(
            _most(record, "--max-ttft-ms", options.max_ttft_ms, "TTFT", "ms", _ms("ttft_s"))
        )
    if options.max_kv_bytes is not None:
        limit = float(options.max_kv_bytes)
        found.append(
            _most(
                record,
                "--max-kv-bytes",
                limit,
                "peak KV cache",
                "bytes",
                lambda item: float(item.kv_bytes_peak),
            )
        )
    if options.baseline is not None and options.max_regression is not None:
        found.append(_regression(record, options.baseline, options.max_regression))
    return found


def _speedup(record: Comparison, limit: float) -> Gate:
    """The smallest speed-up over the first contestant beside the reference."""
    name = "--fail-under-speedup"
    rival = record.contestants[1].name
    pairs = [(row, row.results[1]) for row in record.rows]
    missing = [row.depth for row, item in pairs if item.speedup is None]
    if missing or not pairs:
        where = f" at depth {missing[0]:,}" if missing else ""
        return Gate(name, False, limit, None, f"{name}: no speed-up over {rival}{where} to judge")
    row, worst = min(pairs, key=lambda pair: pair[1].speedup.value if pair[1].speedup else 0.0)
    assert worst.speedup is not None
    value = worst.speedup.value
    passed = value >= limit
    relation = "reaches" if passed else "is under"
    message = (
        f"{name}: {value:.2f}x over {rival} at depth {row.depth:,} {relation} the limit {limit:g}x"
    )
    return Gate(name, passed, limit, value, message)


def _ms(field: str) -> Callable[[Result], float | None]:
    def read(item: Result) -> float | None:
        value: Summary | None = getattr(item, field)
        return None if value is None else value.median * 1e3

    return read


def _most(
    record: Comparison,
    name: str,
    limit: float,
    what: str,
    unit: str,
    read: Callable[[Result], float | None],
) -> Gate:
    """The reference's largest value over the depths against an upper limit."""
    pairs = [(row, value) for row in record.rows if (value := read(row.results[0])) is not None]
    if not pairs:
        return Gate(name, False, limit, None, f"{name}: no {what} was measured")
    row, value = max(pairs, key=lambda pair: pair[1])
    passed = value <= limit
    relation = "within" if passed else f"{value - limit:,.4g} {unit} over"
    message = (
        f"{name}: {what} {value:,.6g} {unit} at depth {row.depth:,} is {relation} the limit "
        f"{limit:,.6g} {unit}"
    )
    return Gate(name, passed, limit, value, message)


def _regression(record: Comparison, baseline: Comparison, limit: float) -> Gate:
    """The reference's TPOT against the baseline's, depth by depth.

    It has regressed when it is slower by more than the limit and by more than both spreads
    together, which chance alone makes.
    """
    before = {row.depth: row for row in baseline.rows}
    verdicts = [
        _regressed(row, before[row.depth], limit) for row in record.rows if row.depth in before
    ]
    known = [verdict for verdict in verdicts if verdict is not None]
    name = "--max-regression"
    if not known:
        return Gate(name, False, limit * 100, None, f"{name}: no TPOT in common with the baseline")
    passed = all(verdict[0] for verdict in known)
    _, change, message = max(known, key=lambda verdict: (not verdict[0], verdict[1]))
    return Gate(name, passed, limit * 100, change * 100, f"{name}: {message}")


def _regressed(now: Row, then: Row, limit: float) -> tuple[bool, float, str] | None:
    """Whether it held, the change as a part, and what to say."""
    new, old = now.results[0].tpot_s, then.results[0].tpot_s
    if new is None or old is None or old.median <= 0:
        return None
    change = new.median / old.median - 1
    spread = math.hypot(new.spread, old.spread) / old.median
    if change <= limit:
        passed, why = True, f"within the limit {limit:.0%}"
    elif change <= spread:
        passed, why = True, f"over the limit {limit:.0%}, but within the spread ±{spread:.1%}"
    else:
        passed, why = (
            False,
            (f"{change - limit:.1%} over the limit {limit:.0%}, spread ±{spread:.1%}"),
        )
    word = "slower" if change >= 0 else "faster"
    message = (
        f"TPOT at depth {now.depth:,} is {new.median * 1e3:.2f} ms where the baseline has "
        f"{old.median * 1e3:.2f} ms, {abs(change):.1%} {word}: {why}"
    )
    return passed, change, message
