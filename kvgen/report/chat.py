"""A conversation's turns: a few lines for people after each, one JSON line for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvgen.measure.turns import Tally, TurnRecord
from kvgen.report.receipt import receipt_lines
from kvgen.report.units import bytes_text, counted, seconds_text

SCHEMA = "kvgen.chat/1"


def turn_document(record: TurnRecord) -> dict[str, Any]:
    """One turn under its schema's name; the fields are described in ``docs/json.md``."""
    times = {"ttft_s": record.ttft_s, "tpot_s": record.tpot_s}
    return {"schema": SCHEMA, "type": "turn"} | asdict(record) | times


def turn_lines(record: TurnRecord) -> list[str]:
    """The receipt of a turn, and what a reader must know of how it went."""
    if not record.new_tokens:
        return ["stopped before the first token; the question is not kept"]
    lines = []
    if record.dropped_turns:
        turns = f"{record.dropped_turns:,} oldest turns were"
        if record.dropped_turns == 1:
            turns = "oldest turn was"
        lines.append(
            f"the context was full: the {turns} dropped, and {record.reuse.computed:,} tokens "
            f"computed for that in {seconds_text(record.prefill_s)}"
        )
    lines += receipt_lines(record.reuse)
    rate = f" at {1 / record.tpot_s:.1f} tokens/s" if record.tpot_s else ""
    limit = f" of {record.context_limit:,}" if record.context_limit is not None else ""
    lines.append(
        f"TTFT {seconds_text(record.ttft_s)}, {record.new_tokens:,} new{rate}; "
        f"context {record.context_tokens:,}{limit} tokens"
    )
    full = record.context_tokens == record.context_limit
    if record.ending == "length":
        lines.append("cut: the context is full" if full else "cut: as many tokens as allowed (-n)")
    elif record.ending == "interrupted":
        lines.append("stopped; the answer so far is kept")
    return lines


def tally_lines(tally: Tally) -> list[str]:
    """The run so far."""
    if not tally.turns:
        return ["no turns yet"]
    share = f" ({tally.reused / tally.submitted:.0%})" if tally.submitted else ""
    return [
        f"turns      {tally.turns:,} answered, {counted(tally.new_tokens, 'new token')}",
        f"submitted  {tally.submitted:,} tokens: {tally.reused:,} reused{share}, "
        f"{tally.computed:,} computed",
        f"saved      about {seconds_text(tally.saved_s)} of prefill",
    ]


def state_line(tokens: int, limit: int | None, cached: int, used: int, allocated: int) -> str:
    """Where a conversation of ``tokens`` stands, ``cached`` of them in the cache; bytes."""
    of = f" of {limit:,}" if limit is not None else ""
    return (
        f"context    {tokens:,}{of} tokens, {cached:,} cached in {bytes_text(used)} "
        f"({bytes_text(allocated)} allocated)"
    )
