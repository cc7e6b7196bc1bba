"""A conversation's turns: a few lines for people after each, one JSON line for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvgen.measure.turns import Tally, TurnRecord
from kvgen.report.units import bytes_text, seconds_text

SCHEMA = "kvgen.chat/1"


def turn_document(record: TurnRecord) -> dict[str, Any]:
    """One turn under its schema's name; the fields are described in ``docs/json.md``."""
    document = {"schema": SCHEMA, "type": "turn"} | asdict(record)
    document["receipt"]["computed"] = record.receipt.computed
    return document | {"ttft_s": record.ttft_s, "tpot_s": record.tpot_s}


def turn_lines(record: TurnRecord) -> list[str]:
    """The receipt of a turn, and what a reader must know of how it went."""
    receipt = record.receipt
    lines = []
    if record.dropped_turns:
        turns = "the oldest turn was" if record.dropped_turns == 1 else _oldest(record)
        lines.append(
            f"the context was full: {turns} dropped, which cost {receipt.computed:,} tokens "
            f"computed anew, {seconds_text(record.prefill_s)}"
        )
    parts = (
        f"{receipt.submitted:,} tokens: {receipt.reused:,} reused, {receipt.computed:,} computed"
    )
    if not record.new_tokens:
        return [*lines, "stopped before the first token; the question is not kept"]
    saved = f", about {seconds_text(receipt.saved_s)} saved" if receipt.saved_s else ""
    rate = f" at {1 / record.tpot_s:.1f} tokens/s" if record.tpot_s else ""
    lines.append(
        f"{parts}{saved}; TTFT {seconds_text(record.ttft_s)}, {record.new_tokens:,} new{rate}; "
        f"context {_context(record)}"
    )
    whys = [why for why in (record.why_no_further, receipt.why_fewer) if why is not None]
    if whys:
        lines.append("not more: " + "; ".join(whys))
    full = record.context_tokens == record.context_limit
    if record.ending == "length":
        lines.append("cut: the context is full" if full else "cut: as many tokens as allowed (-n)")
    elif record.ending == "interrupted":
        lines.append("stopped; the answer so far is kept")
    return lines


def tally_lines(tally: Tally, record: TurnRecord | None) -> list[str]:
    """The run so far; ``record`` is of its last turn."""
    if record is None or not tally.turns:
        return ["no turns yet"]
    share = f" ({tally.reused / tally.submitted:.0%})" if tally.submitted else ""
    return [
        f"turns      {tally.turns:,} answered, {tally.new_tokens:,} new tokens",
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


def _oldest(record: TurnRecord) -> str:
    return f"the {record.dropped_turns:,} oldest turns were"


def _context(record: TurnRecord) -> str:
    limit = record.context_limit
    return f"{record.context_tokens:,}" + (f" of {limit:,}" if limit is not None else "")
