"""The third number: what each token would have cost without a cache, and the proof that the cache
changed nothing. Runs after generation, outside every timed step.

The uncached forward over the whole prefix is really run at some positions; the costs between them
come from a curve fitted to these, and are marked as fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kvgen.measure.clock import Clock
from kvgen.measure.records import Check, CheckedStep, Step
from kvgen.measure.verdict import (
    compare_step,
    judge,
    largest_logit,
    lossy_tolerance,
    tolerance,
)


class KeptLogits:
    """The logits of evenly spaced steps, at most ``limit`` of them, for a run of unknown length.

    The first and the newest step are always among them. When the others grow too many, every
    second one is dropped and the spacing doubles.
    """

    def __init__(self, limit: int) -> None:
        """``limit`` is at least 2: it bounds memory, a vocabulary's worth of numbers each."""
        self._limit = limit
        self._spacing = 1
        self._spaced: dict[int, Tensor] = {}
        self._newest: tuple[int, Tensor] | None = None

    def add(self, index: int, logits: Tensor) -> None:
        """Offer the logits ``[vocab]`` of step ``index``; steps come in order."""
        self._newest = (index, logits)
        if index % self._spacing:
            return
        self._spaced[index] = logits
        if len(self._spaced) >= self._limit:
            self._spacing *= 2
            self._spaced = {i: t for i, t in self._spaced.items() if i % self._spacing == 0}

    def by_step(self) -> dict[int, Tensor]:
        """The kept logits by step index."""
        return self._spaced | (dict([self._newest]) if self._newest else {})


def spread_order(indexes: list[int]) -> Iterator[int]:
    """The same indexes, each as far from those before it as can be: last, first, middle, ...

    Wherever a time budget ends, what was measured covers the whole output.
    """
    left = sorted(indexes)
    taken: list[int] = []
    while left:
        best = max(left, key=lambda i: (min((abs(i - t) for t in taken), default=i), i))
        left.remove(best)
        taken.append(best)
        yield best


@dataclass
class Recomputed:
    """Uncached costs in seconds by step index, and the check of their predictions."""

    measured_s: dict[int, float] = field(default_factory=dict)
    check: Check | None = None
    out_of_time: bool = False


def recompute(
    forward: Callable[[list[int]], Tensor],
    ids: list[int],
    prompt_tokens: int,
    kept: dict[int, Tensor],
    clock: Clock,
    dtype: str,
    budget_s: float | None,
    at_most: int | None,
    rescaled_from: int | None = None,
    lossy: float | None = None,
) -> Recomputed:
    """Run the uncached ``forward`` at the kept steps and compare its logits with the cached ones.

    Step ``i`` predicts from the first ``prompt_tokens + i`` ids. ``budget_s`` ends the runs when
    the next one is not expected to fit (the first always runs); ``at_most`` bounds their number.
    ``rescaled_from`` is explained at ``judge``; ``lossy`` is the relative tolerance of a cache that
    changes predictions.
    """
    result = Recomputed()
    checked: list[CheckedStep] = []
    largest = 0.0
    begin = clock.now()
    order = list(spread_order(list(kept)))[:at_most]
    for turn, index in enumerate(order):
        prefix = ids[: prompt_tokens + index]
        spent = clock.now() - begin
        expected = max(result.measured_s.values(), default=0.0)
        if turn and budget_s is not None and spent + expected > budget_s:
            result.out_of_time = True
            break
        before = clock.now()
        logits = forward(prefix)
        result.measured_s[index] = clock.now() - before
        checked.append(compare_step(index, kept[index], logits))
        largest = max(largest, largest_logit(logits))
    if checked:
        checked.sort(key=lambda step: step.index)
        accepted = lossy_tolerance(lossy, largest)
        result.check = judge(checked, tolerance(dtype, largest), rescaled_from, accepted)
    return result


def fill_in(steps: list[Step], measured_s: dict[int, float]) -> None:
    """Give every step its uncached cost: measured where it was, fitted elsewhere."""
    if not measured_s:
        return
    lengths = np.array([steps[i].position for i in measured_s], dtype=float)
    curve = fit_cost(lengths, np.array(list(measured_s.values())))
    for step in steps:
        if step.index in measured_s:
            step.recompute_s = measured_s[step.index]
            step.recompute_source = "measured"
        else:
            step.recompute_s = max(0.0, float(curve(step.position)))
            step.recompute_source = "fitted"


def fit_cost(lengths: np.ndarray, seconds: np.ndarray) -> np.polynomial.Polynomial:
    """Seconds of an uncached forward as a polynomial in its length, by least squares.

    Degree 2 is what a transformer's forward costs (projections linear, attention quadratic). A
    lower degree is taken when there are too few points for it or when the fit would fall with
    length, which no forward does: that is noise.
    """
    span = (lengths.min(), lengths.max())
    for degree in (2, 1):
        if len(set(lengths)) <= degree:
            continue
        curve = np.polynomial.Polynomial.fit(lengths, seconds, degree)
        if all(curve.deriv()(edge) >= 0 for edge in span):
            return curve
    return np.polynomial.Polynomial([seconds.mean()])
