"""An explanation as text of at most 80 columns, for people. Measures nothing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from kvgen.measure.explanation import Boundary, Explanation, LayerState, Stage
from kvgen.report.grid import equal_runs, grid_lines, kept, strip_lines
from kvgen.report.units import bytes_text, seconds_text, visible

WIDTH = 80
_TOKENS_SHOWN = 12
_STEPS_SHOWN = 8
_DIGITS = 12


def explanation_text(record: Explanation) -> str:
    """The whole story, ending in a line break."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Explanation) -> Iterator[str]:
    model, where = record.model, record.environment
    layers = f"{len(record.layers)} layers" if len(record.layers) > 1 else "1 layer"
    named = f"{model.name} ({model.model_type}, {layers})"
    yield from _paragraph(f"{named}, {where.dtype} on {where.device}")
    yield ""
    yield from _prefill(record)
    for index in kept(len(record.stages) - 1, _STEPS_SHOWN):
        yield ""
        if index is None:
            yield "..."
        else:
            yield from _step(record, record.stages[index + 1])
    yield ""
    yield from _paragraph(_why_no_queries(record))
    yield ""
    yield f"Which token did what (layer {record.layer}, {record.layers[record.layer].kind})"
    yield from _indented(grid_lines(record))
    yield ""
    yield "What each layer holds at the end"
    yield from _indented(strip_lines(record))
    yield ""
    if record.boundary is not None:
        yield from _boundary(record, record.boundary)
        yield ""
    yield from _training(record)
    for note in record.notes:
        yield from _paragraph(f"Note: {note}.")


def _prefill(record: Explanation) -> Iterator[str]:
    stage = record.stages[0]
    yield f"Prefill: {_tokens(stage.tokens)} in one forward, input {stage.input_shape}"
    for index in kept(record.prompt_tokens, _TOKENS_SHOWN):
        if index is None:
            yield "    ..."
            continue
        token = record.tokens[index]
        yield f"  position {token.position:<5} id {token.id:<8} {_quoted(token.token, 48)}"
    yield from _stored(record, stage)
    used, allocated = bytes_text(stage.kv_bytes_used), bytes_text(stage.kv_bytes_allocated)
    yield f"  cache     {used} used, {allocated} allocated"
    yield from _choices(stage)
    yield from _agreement(stage)


def _stored(record: Explanation, stage: Stage) -> Iterator[str]:
    """What each layer stored; neighbours that store the same are one line."""
    keys = [_kept_by(record, layer) for layer in stage.layers]
    runs = equal_runs(keys)
    for first, end in runs[:_STEPS_SHOWN]:
        name = f"layers {first}-{end - 1}" if end - first > 1 else f"layer {first}"
        each = " each" if end - first > 1 else ""
        yield from _paragraph(f"{name} keep{'' if each else 's'} {keys[first]}{each}", "  ")
    if len(runs) > _STEPS_SHOWN:
        yield f"  ... and {len(keys) - runs[_STEPS_SHOWN][0]} more layers"


def _kept_by(record: Explanation, layer: LayerState) -> str:
    facts = record.layers[layer.index]
    if not layer.stored:
        return f"nothing ({facts.kind})"
    tensors = ", ".join(f"{stored.name} {stored.shape}" for stored in layer.stored)
    slots = ""
    if layer.first_position is not None and layer.end_position is not None:
        slots = f" in {layer.end_position - layer.first_position} of {layer.slots} slots"
    return f"{tensors}: {layer.bytes_used:,} B{slots}"


def _step(record: Explanation, stage: Stage) -> Iterator[str]:
    fed = record.tokens[stage.first_position]
    where = f"position {fed.position}, input {stage.input_shape}"
    yield f"Step {stage.index}: {_quoted(fed.token, 30)} alone, {where}"
    yield from _attention(record, stage)
    yield (
        f"  cache     {bytes_text(stage.kv_bytes_before)} before, "
        f"{bytes_text(stage.kv_bytes_used)} after"
    )
    yield from _proof(record, stage)
    yield from _choices(stage)
    twin = stage.twin
    yield (
        f"  without   {_tokens(twin.tokens)} run, {twin.repeated} of them again "
        f"({twin.repeated_so_far} again so far)"
    )
    yield from _agreement(stage)


def _attention(record: Explanation, stage: Stage) -> Iterator[str]:
    seen, facts = stage.attention, record.layers[stage.attention.layer]
    name = f"layer {seen.layer}"
    if seen.key_shape is None and seen.keys_read is None:
        yield from _paragraph(f"{name} ({facts.kind}) keeps {facts.keeps}; no pair is read", "  ")
        return
    query = f"query {seen.query_shape}, " if seen.query_shape else ""
    if seen.key_shape is None:
        yield f"  {name:<9} {query}reads another layer's pairs"
    else:
        yield f"  {name:<9} {query}key {seen.key_shape}, value {seen.value_shape}"
    if seen.keys_read is not None:
        yield f"  read      {seen.keys_read} pairs: {seen.stored_read} stored and its own"
    gone = stage.layers[seen.layer].first_position
    if gone:
        yield f"  evicted   positions 0 to {gone - 1} have left the window of {facts.window}"


def _proof(record: Explanation, stage: Stage) -> Iterator[str]:
    """That nothing stored earlier changed, or where it did."""
    changed = [layer.index for layer in stage.layers if layer.unchanged is False]
    proven = [layer for layer in stage.layers if layer.unchanged is not None]
    states = [layer for layer in stage.layers if layer.unchanged is None and layer.sha256_after]
    if changed:
        yield f"  EARLIER PAIRS CHANGED in layer {', '.join(map(str, changed))}"
    elif proven:
        shown = next((layer for layer in proven if layer.index == record.layer), proven[0])
        before, after = shown.sha256_before or "", shown.sha256_after or ""
        yield (
            f"  unchanged {_pairs(shown.earlier)} of layer {shown.index}: sha256 "
            f"{before[:_DIGITS]} = {after[:_DIGITS]};"
        )
        yield f"            so in all {len(proven)} layers with earlier pairs"
    if states:
        size = bytes_text(sum(layer.bytes_used for layer in states))
        yield f"  replaced  the states of {len(states)} layers, {size} before and after"


def _choices(stage: Stage) -> Iterator[str]:
    shown = ", ".join(f"{_quoted(c.token, 14)} {c.probability:.1%}" for c in stage.choices)
    yield f"  next      {_cut(shown, WIDTH - 12)}"


def _agreement(stage: Stage) -> Iterator[str]:
    twin = stage.twin
    same = "same token" if twin.same_token else "ANOTHER token"
    yield f"  agree     {same} without the cache, max |Δlogit| {twin.max_abs_logit_difference:.1e}"
    if stage.latency_s is not None and twin.latency_s is not None:
        yield (
            f"  time      {seconds_text(stage.latency_s)} with the cache, "
            f"{seconds_text(twin.latency_s)} without"
        )


def _why_no_queries(record: Explanation) -> str:
    if any(layer.num_key_value_heads for layer in record.layers):
        return (
            "Queries are not stored: a query is read once, by its own position, and no later token "
            "asks for it again. Keys and values are read by every later token."
        )
    return (
        "No pairs are stored: a recurrent layer folds each token into a state of fixed size, and "
        "the next token needs that state only."
    )


def _boundary(record: Explanation, it: Boundary) -> Iterator[str]:
    yield f"The boundary, at {_tokens(it.tokens)}"
    saved, whole = _count(it.saved_operations), _count(it.uncached_operations)
    left, reading = _count(it.cached_operations), _count(it.remaining_attention_operations)
    weights, held = bytes_text(it.weight_bytes_read), bytes_text(it.kv_bytes_read)
    yield f"  saved     {saved} of {whole} operations: the layers of earlier tokens"
    counted = f", {reading} of them reading the prefix" if it.remaining_attention_operations else ""
    yield f"  remains   {left} operations{counted}"
    yield f"  read      {weights} of weights, {held} of cache"
    if it.kv_bytes_per_token:
        growth = bytes_text(it.kv_bytes_per_token)
        yield f"  grows     {growth} of cache to read per token of context"
    if it.kv_equals_weights_at is None:
        yield "  meets     never: the cache stays smaller than the weights read at each step"
    else:
        where = f"{it.kv_equals_weights_at:,} tokens"
        yield f"  meets     a step reads as much cache as weights at {where}"
    if it.bandwidth_bytes_per_s and it.operations_per_s and it.step_limit_s:
        yield (
            f"  machine   reads {it.bandwidth_bytes_per_s / 1e9:.1f} GB/s, computes "
            f"{it.operations_per_s / 1e9:.1f} G operations/s"
        )
        yield (
            f"  limits    {seconds_text(it.step_limit_s)} a step with the cache, "
            f"{seconds_text(it.uncached_limit_s or 0)} without"
        )
        together = f"{it.compute_bound_from:,.0f}"
        yield f"  part      up to about {together} tokens both paths wait for the weights;"
        yield "            beyond, the uncached one grows with every token"
    if record.curve:
        yield f"  {'tokens':>7} {'with cache':>12} {'without':>12}   measured"
        for point in record.curve:
            yield (
                f"  {point.tokens:>7,} {seconds_text(point.cached_s):>12} "
                f"{seconds_text(point.uncached_s):>12}{_prefill_mark(record, point.tokens)}"
            )


def _prefill_mark(record: Explanation, tokens: int) -> str:
    return "   prefill" if tokens == record.prompt_tokens else ""


def _training(record: Explanation) -> Iterator[str]:
    it = record.training
    if it is None:
        return
    verdict = "the same as" if it.agrees else "NOT THE SAME as"
    yield from _paragraph(
        f"Training needs no cache: one masked forward over all {it.positions} positions gives "
        f"{verdict} the stages did one by one, max |Δlogit| {it.max_abs_logit_difference:.1e}."
    )


def _paragraph(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(visible(text), WIDTH, initial_indent=indent, subsequent_indent=indent * 2)


def _indented(lines: list[str]) -> list[str]:
    return ["  " + line for line in lines]


def _quoted(token: str, room: int) -> str:
    return _cut(visible(json.dumps(token, ensure_ascii=False)), room)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _pairs(count: int) -> str:
    return f"{count} earlier pair{'' if count == 1 else 's'}"


def _count(operations: int) -> str:
    for scale, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if operations >= scale:
            return f"{operations / scale:.3g} {name}"
    return str(operations)
