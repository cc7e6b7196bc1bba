"""Cost against prefix length, measured: the stages of an explanation and a few longer prefixes.

Both paths run over the same ids, in turns, unwatched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from torch import Tensor

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.cache.spec import LayerSpec
from kvgen.engine.forward import Forward
from kvgen.measure.clock import Clock
from kvgen.measure.explanation import CurvePoint, Explanation

_REPETITIONS = 3
_STEPS_AT_A_DEPTH = 3
_SHORTEST = 16
# Longer prefixes are tried while one uncached forward over each, together, takes at most this
# many counted operations: a second or two on a laptop, and the same points on every machine.
_MOST_OPERATIONS = 1e11


def time_curve(
    record: Explanation,
    forward: Forward,
    specs: Sequence[LayerSpec],
    ids: list[int],
    clock: Clock,
) -> None:
    """Give stages and twins their median latency, and the record its curve."""
    timer = _Timer(forward, specs, clock)
    timer.stages(record, ids)
    for tokens in _depths(record, len(ids)):
        repeated = (ids[:-1] * (tokens // len(ids[:-1]) + 2))[: tokens + _STEPS_AT_A_DEPTH]
        record.curve.append(timer.depth(repeated, tokens))
    record.curve.sort(key=lambda point: point.tokens)


def _depths(record: Explanation, done: int) -> list[int]:
    """Prefix lengths beyond the stages, doubling."""
    last = record.stages[-1].twin
    limit = record.model.context_limit
    depths: list[int] = []
    tokens, operations = _SHORTEST, 0.0
    while True:
        operations += tokens * last.operations / last.tokens
        if operations > _MOST_OPERATIONS or tokens >= 4096:
            return depths
        if limit is not None and tokens + _STEPS_AT_A_DEPTH > limit:
            return depths
        if tokens > done:
            depths.append(tokens)
        tokens *= 2


class _Timer:
    def __init__(self, forward: Forward, specs: Sequence[LayerSpec], clock: Clock) -> None:
        self._forward, self._specs, self._clock = forward, specs, clock

    def stages(self, record: Explanation, ids: list[int]) -> None:
        """The same stages again, several times; the first time warms up and is dropped."""
        cached: list[list[float]] = [[] for _ in record.stages]
        uncached: list[list[float]] = [[] for _ in record.stages]
        for turn in range(_REPETITIONS + 1):
            cache = TransformersCache(KVCache(self._specs))
            for index, stage in enumerate(record.stages):
                end = stage.first_position + stage.tokens
                fed = ids[stage.first_position : end]
                ours, _ = self._timed(self._forward.cached, fed, cache)
                theirs, _ = self._timed(self._forward.uncached, ids[:end])
                if turn:
                    cached[index].append(ours)
                    uncached[index].append(theirs)
        for stage, steps, wholes in zip(record.stages, cached, uncached, strict=True):
            stage.latency_s, stage.twin.latency_s = median(steps), median(wholes)
            difference = stage.twin.max_abs_logit_difference
            record.curve.append(
                CurvePoint(
                    stage.twin.tokens, stage.latency_s, stage.twin.latency_s, difference, "stage"
                )
            )

    def depth(self, ids: list[int], tokens: int) -> CurvePoint:
        """One more token after ``tokens - 1``: a few steps, and forwards over all of them."""
        cache = TransformersCache(KVCache(self._specs))
        self._forward.cached(ids[: tokens - 1], cache)
        steps = []
        for end in range(tokens, tokens + _STEPS_AT_A_DEPTH):
            steps.append(self._timed(self._forward.cached, ids[end - 1 : end], cache))
        wholes = [self._timed(self._forward.uncached, ids[:tokens]) for _ in range(2)]
        difference = float((steps[0][1].float() - wholes[0][1].float()).abs().max())
        seconds = [took for took, _ in steps]
        fastest = min(took for took, _ in wholes)
        return CurvePoint(tokens, median(seconds), fastest, difference, "sweep")

    def _timed(self, run: Callable[..., Tensor], *arguments: Any) -> tuple[float, Tensor]:
        begin = self._clock.now()
        logits = run(*arguments)
        return self._clock.now() - begin, logits
