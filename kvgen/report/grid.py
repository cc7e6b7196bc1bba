"""The picture of an explanation in characters: tokens by steps, and what each layer holds.

Readable without colour and in 80 columns: long sequences lose their middle, and say so.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.measure.explanation import Cell, Explanation, LayerState

MARKS: dict[Cell, str] = {
    "computed": "#",
    "read": "=",
    "recomputed": "R",
    "evicted": "x",
    "state": "~",
    "none": "-",
    "ahead": ".",
}
_MEANINGS: dict[Cell, str] = {
    "computed": "computed",
    "read": "read from the cache",
    "recomputed": "computed again",
    "evicted": "evicted from the window",
    "state": "summed up in a state",
    "none": "not read",
    "ahead": "not there yet",
}
_COLUMNS = 29
_ROWS = 18
_STRIP = 36
_GAP = " "


def grid_lines(record: Explanation) -> list[str]:
    """Both paths side by side: one row per stage, one column per position, and their counts."""
    stages = record.stages
    total = len(stages[0].cells)
    columns = kept(total, _COLUMNS)
    width = max(len(columns) + (1 if None in columns else 0), 14)
    lines = [
        f"{'':<10}{'with the cache':<{width}}   without",
        f"{'position':<10}{_ruler(columns):<{width}}   {_ruler(columns)}",
    ]
    for row in kept(len(stages), _ROWS):
        if row is None:
            lines.append("...")
            continue
        stage = stages[row]
        name = "prefill" if stage.index == 0 else f"step {stage.index}"
        ours, theirs = _marks(stage.cells, columns), _marks(stage.twin.cells, columns)
        lines.append(f"{name:<10}{ours:<{width}}   {theirs}".rstrip())
    work = record.work
    lines.append(f"{'forwarded':<10}{f'{work.cached} tokens':<{width}}   {work.uncached} tokens")
    return lines + _legend(record)


def _legend(record: Explanation) -> list[str]:
    used = {cell for stage in record.stages for cell in (*stage.cells, *stage.twin.cells)}
    parts = [f"{MARKS[cell]} {_MEANINGS[cell]}" for cell in MARKS if cell in used]
    rows = [parts[:3], parts[3:]]
    return [f"{'':<10}{'   '.join(row)}" for row in rows if row]


def strip_lines(record: Explanation) -> list[str]:
    """After the last stage: the positions each layer still holds, equal layers on one line."""
    last = record.stages[-1]
    total = last.twin.tokens
    columns = kept(total, _STRIP)
    lines = [f"{'layer':<10}{_ruler(columns)}"]
    for first, end in equal_runs([_held(record, layer) for layer in last.layers]):
        name = f"{first}" if first == end - 1 else f"{first}-{end - 1}"
        lines.append(f"{name:<10}{_strip(record, last.layers[first], total, columns)}")
    return lines


def _held(record: Explanation, layer: LayerState) -> object:
    return record.layers[layer.index].kind, layer.first_position, layer.end_position


def _strip(
    record: Explanation, layer: LayerState, total: int, columns: Sequence[int | None]
) -> str:
    facts = record.layers[layer.index]
    cells: list[Cell]
    if layer.first_position is None or layer.end_position is None:
        state = any(stored.name in ("state", "pool") for stored in layer.stored)
        cells = ["state" if state else "none"] * total
    else:
        gone: Cell = "state" if "pool" in {stored.name for stored in layer.stored} else "evicted"
        cells = [gone] * layer.first_position
        cells += ["read"] * (layer.end_position - layer.first_position)
    held = _marks(cells, columns)
    return f"{held}   {facts.kind}"


def equal_runs(values: Sequence[object]) -> list[tuple[int, int]]:
    """Ranges of neighbours that are equal."""
    runs: list[tuple[int, int]] = []
    for index, value in enumerate(values):
        if runs and values[runs[-1][0]] == value:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def kept(count: int, room: int) -> list[int | None]:
    """Which of ``count`` to show in ``room`` places; ``None`` stands for those left out."""
    if count <= room:
        return list(range(count))
    head = room // 2
    tail = room - head - 1
    return [*range(head), None, *range(count - tail, count)]


def _ruler(columns: Sequence[int | None]) -> str:
    return "".join(_GAP if c is None else str(c % 10) for c in columns)


def _marks(cells: Sequence[Cell], columns: Sequence[int | None]) -> str:
    return "".join(":" if c is None else MARKS[cells[c]] for c in columns)
