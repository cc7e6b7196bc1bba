"""Statistics of raw samples: medians, spreads, percentiles, ratios, fitted lines. Knows no torch.

A spread is half the interquartile range: the middle half of the samples lies within about one
spread of the median. It is used rather than the standard deviation because one disturbed sample on
a busy machine does not move it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Summary:
    """What repeated measurements of one quantity amount to, in the quantity's own unit."""

    median: float
    spread: float
    """Half the interquartile range; 0 for a single sample."""
    minimum: float
    maximum: float
    count: int


@dataclass
class Ratio:
    """One quantity over another."""

    value: float
    spread: float
    """Propagated from both spreads."""


@dataclass
class Line:
    """A straight line through measured points, by least squares."""

    intercept: float
    """Value at zero."""
    slope: float
    slope_error: float
    """Standard error of the slope: what scatter alone could make of it."""
    points: int

    @property
    def is_clear(self) -> bool:
        """Whether the slope stands out from the scatter."""
        return self.slope > 2 * self.slope_error


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the samples lie, interpolated between neighbours.

    Raises ``ValueError`` for no samples.
    """
    if not samples:
        raise ValueError("no samples have no percentile")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(samples: Sequence[float]) -> float:
    """The middle value. Raises ``ValueError`` for no samples."""
    return percentile(samples, 50)


def summary(samples: Sequence[float]) -> Summary | None:
    """Median, spread, extremes and count; ``None`` for no samples."""
    if not samples:
        return None
    spread = (percentile(samples, 75) - percentile(samples, 25)) / 2
    return Summary(median(samples), spread, min(samples), max(samples), len(samples))


def ttft(tokenize_s: float, latencies: Sequence[float]) -> float | None:
    """Seconds from the request to the first token; ``None`` without one."""
    return tokenize_s + latencies[0] if latencies else None


def tpot(latencies: Sequence[float]) -> float | None:
    """Mean seconds per output token after the first, (end - first token) / (n - 1).

    ``None`` below two tokens.
    """
    return sum(latencies[1:]) / (len(latencies) - 1) if len(latencies) > 1 else None


def ratio(top: Summary | None, bottom: Summary | None) -> Ratio | None:
    """``top / bottom`` of two independent measurements; ``None`` when either does not exist.

    Relative spreads add in squares: s(a/b) = a/b sqrt((s(a)/a)^2 + (s(b)/b)^2).
    """
    if top is None or bottom is None or top.median <= 0 or bottom.median <= 0:
        return None
    value = top.median / bottom.median
    relative = math.hypot(top.spread / top.median, bottom.spread / bottom.median)
    return Ratio(value, value * relative)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """The least-squares line; ``None`` for fewer than three points or a single ``x``."""
    count = len(xs)
    if count < 3 or len(set(xs)) < 2:
        return None
    x_mean, y_mean = sum(xs) / count, sum(ys) / count
    width = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / width
    intercept = y_mean - slope * x_mean
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(intercept, slope, math.sqrt(left / (count - 2) / width), count)


def break_even(cached: Sequence[float], uncached: Sequence[float]) -> int | None:
    """The first step, counting from 0, after which ``cached`` has cost less in total.

    Both are latencies per step of the same tokens. ``None`` when that never happened.
    """
    ours = theirs = 0.0
    for step, (one, other) in enumerate(zip(cached, uncached, strict=False)):
        ours += one
        theirs += other
        if ours < theirs:
            return step
    return None
