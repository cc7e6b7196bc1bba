"""The proof that a cache changes nothing: checks of one model against its own uncached forward.

Each check forwards the same ids in another way and compares the logits at every position with one
parallel forward over all of them. That forward is also how a model is trained: a causal mask makes
every position's prediction at once, so the comparison says as much about training as about reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kvgen.cache.adapter import TransformersCache, continues_prefill, specs_for
from kvgen.cache.layers import CannotTrimError
from kvgen.cache.manager import KVCache
from kvgen.engine.forward import Forward

CHUNK_SIZES = (1, 3, 7)


@dataclass(frozen=True)
class Outcome:
    """What one check found."""

    check: str
    status: Literal["pass", "fail", "not applicable"]
    max_abs_logit_difference: float | None = None
    position: int | None = None
    """The first position that failed."""
    detail: str = ""


class Verifier:
    """The checks for one model on one sequence of ids.

    ``prompt`` of the ``ids`` are forwarded together first; the rest follows. Logits may differ by
    ``limit``. The sequence should be longer than any window, so that windows are passed.
    """

    def __init__(
        self, model: Any, ids: list[int], prompt: int, limit: float, step: int = 256
    ) -> None:
        """``step`` is the slots that buffers grow by. Raises ``ModelError`` for a model that the
        cache does not serve.
        """
        self._forward = Forward(model)
        self._specs = specs_for(model)
        self._many = continues_prefill(model)
        self._itemsize = model.dtype.itemsize
        self._ids = ids
        self._prompt = prompt
        self._limit = limit
        self._step = step
        self._parallel = self._forward.uncached_everywhere(ids)

    def outcomes(self) -> Iterator[Outcome]:
        """Run every check, one after another."""
        yield self.stepwise()
        for size in CHUNK_SIZES:
            yield self.chunked(size)
        yield self.trim_and_regenerate()
        yield self.fork_is_independent()
        yield self.reset_and_repeat()
        yield self.bytes_follow_the_formula()

    def stepwise(self) -> Outcome:
        """The prompt together, then one token at a time."""
        cache = self._new_cache()
        ones = [1] * (len(self._ids) - self._prompt)
        return self._compare("token by token", lambda: self._feed(cache, [self._prompt, *ones]), 0)

    def chunked(self, size: int) -> Outcome:
        """Everything in pieces of ``size`` tokens."""
        name = f"chunks of {size}"
        if size > 1 and not self._many:
            return _not_applicable(name, "the model does not continue its state over chunks")
        whole, rest = divmod(len(self._ids), size)
        sizes = [size] * whole + ([rest] if rest else [])
        return self._compare(name, lambda: self._feed(self._new_cache(), sizes), 0)

    def trim_and_regenerate(self) -> Outcome:
        """Take the last tokens back, forward others, take them back, forward the right ones."""
        name = "trim and regenerate"
        cache = self._new_cache()
        self._feed(cache, [self._prompt])
        try:
            self._feed(cache, [1, 1])
            cache.kv.trim(2)
        except CannotTrimError as refusal:
            return _unchanged_after_refusal(name, cache.kv, self._prompt + 2, refusal)
        wrong = [self._ids[0]] * 2
        for token in wrong:
            self._forward.cached([token], cache)
        cache.kv.trim(2)
        ones = [1] * (len(self._ids) - self._prompt)
        return self._compare(name, lambda: self._feed(cache, ones), self._prompt)

    def fork_is_independent(self) -> Outcome:
        """Tokens forwarded through a fork leave the original as it was."""
        cache = self._new_cache()
        self._feed(cache, [self._prompt])
        twin = TransformersCache(cache.kv.fork())
        for token in [self._ids[0]] * 3:
            self._forward.cached([token], twin)
        ones = [1] * (len(self._ids) - self._prompt)
        return self._compare("fork is independent", lambda: self._feed(cache, ones), self._prompt)

    def reset_and_repeat(self) -> Outcome:
        """A cache that was used and reset gives what a new one gives."""
        cache = self._new_cache()
        self._feed(cache, [self._prompt, 1, 1])
        cache.kv.reset()
        ones = [1] * (len(self._ids) - self._prompt)
        return self._compare(
            "reset and repeat", lambda: self._feed(cache, [self._prompt, *ones]), 0
        )

    def bytes_follow_the_formula(self) -> Outcome:
        """Bytes on the tensors equal the formula after every forward."""
        name = "bytes follow the formula"
        cache = self._new_cache()
        for size in [self._prompt] + [1] * (len(self._ids) - self._prompt):
            self._feed(cache, [size])
            formula = cache.kv.bytes_formula(self._itemsize)
            if formula is None:
                return _not_applicable(name, "no formula is known for a layer of this model")
            if cache.kv.bytes_used != formula:
                detail = f"{cache.kv.bytes_used} bytes held, {formula} predicted"
                return Outcome(name, "fail", position=cache.kv.position, detail=detail)
        return Outcome(name, "pass")

    def _new_cache(self) -> TransformersCache:
        return TransformersCache(KVCache(self._specs, self._step))

    def _feed(self, cache: TransformersCache, sizes: list[int]) -> list[Tensor]:
        """Forward the next ids in pieces of these sizes; logits ``[size, vocab]`` of each."""
        results = []
        for size in sizes:
            begin = cache.kv.position
            results.append(self._forward.cached_everywhere(self._ids[begin : begin + size], cache))
        return results

    def _compare(self, name: str, run: Callable[[], list[Tensor]], first: int) -> Outcome:
        """Hold the logits of a run that begins at position ``first`` against the parallel ones."""
        worst, position, failed = 0.0, first, None
        for logits in run():
            expected = self._parallel[position : position + len(logits)]
            each = (logits.float() - expected.float()).abs().amax(dim=-1)
            # Written so that a NaN fails.
            wrong = (~(each <= self._limit)).nonzero()
            if failed is None and len(wrong):
                failed = position + int(wrong[0])
            worst = max(worst, float(each.max()))
            position += len(logits)
        return Outcome(name, "pass" if failed is None else "fail", worst, failed)


def _not_applicable(name: str, why: str) -> Outcome:
    return Outcome(name, "not applicable", detail=why)


def _unchanged_after_refusal(
    name: str, cache: KVCache, position: int, refusal: CannotTrimError
) -> Outcome:
    """A refused trim is right, if it changed nothing."""
    if cache.position != position:
        detail = f"refused, yet the position moved from {position} to {cache.position}"
        return Outcome(name, "fail", position=position, detail=detail)
    return _not_applicable(name, str(refusal))
