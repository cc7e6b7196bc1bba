"""Points over two axes in a terminal: plain characters, no colour, a fixed width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvgen.report.units import seconds_text

MARKS = "*o+x#@%="
_LABEL = 9
_LOG_FROM = 6  # a range this wide hides the smaller curve on a linear axis


class Series(NamedTuple):
    """One curve: its name, positions in tokens, and seconds."""

    name: str
    positions: Sequence[int]
    seconds: Sequence[float]


def chart(series: Sequence[Series], width: int = 80, height: int = 14) -> list[str]:
    """Lines of text: latency upwards, position rightwards, one mark per curve; the first on top.

    The time axis is logarithmic when the curves lie far apart, and says so. Nothing to show gives
    no lines.
    """
    points = [(x, y) for one in series for x, y in zip(one.positions, one.seconds, strict=True)]
    points = [(x, y) for x, y in points if y > 0]
    if len(points) < 2:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    logarithmic = high / low > _LOG_FROM
    bottom, top = (low, high) if logarithmic else (0.0, high)
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    columns = width - _LABEL - 2
    grid = [[" "] * columns for _ in range(height)]
    for index in reversed(range(len(series))):
        for x, y in zip(series[index].positions, series[index].seconds, strict=True):
            if y > 0:
                column = round((x - left) / max(1, right - left) * (columns - 1))
                level = _place(y, bottom, top, logarithmic)
                grid[height - 1 - round(level * (height - 1))][column] = MARKS[index % len(MARKS)]
    scale = "log scale" if logarithmic else "linear scale"
    lines = [f"time per step against position ({scale})"]
    for number, row in enumerate(grid):
        level = 1 - number / (height - 1)
        show = number % 4 == 0 or number == height - 1
        label = seconds_text(_value(level, bottom, top, logarithmic)) if show else ""
        lines.append(f"{label:>{_LABEL}} |{''.join(row).rstrip()}")
    lines.append(" " * _LABEL + " +" + "-" * columns)
    lines.append(" " * (_LABEL + 2) + _axis(left, right, columns))
    keys = [f"{MARKS[i % len(MARKS)]} {one.name}" for i, one in enumerate(series)]
    return lines + _wrapped(keys, _LABEL + 2, width)


def _place(value: float, bottom: float, top: float, logarithmic: bool) -> float:
    if top <= bottom:
        return 0.0
    if logarithmic:
        return math.log(value / bottom) / math.log(top / bottom)
    return (value - bottom) / (top - bottom)


def _value(level: float, bottom: float, top: float, logarithmic: bool) -> float:
    if logarithmic:
        return float(bottom * (top / bottom) ** level)
    return bottom + (top - bottom) * level


def _axis(left: int, right: int, columns: int) -> str:
    ends = f"{left:,}", f"{right:,} tokens"
    return ends[0] + "position".center(columns - len(ends[0]) - len(ends[1])) + ends[1]


def _wrapped(words: Sequence[str], indent: int, width: int) -> list[str]:
    lines = [" " * indent]
    for word in words:
        if lines[-1].strip() and len(lines[-1]) + len(word) > width:
            lines.append(" " * indent)
        lines[-1] += word + "   "
    return [line.rstrip() for line in lines]
