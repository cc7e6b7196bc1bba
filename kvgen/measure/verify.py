"""The proof that a cache changes nothing: checks of one model against its own uncached forward.

Each check forwards the same ids in another way and compares the logits at every position with one
parallel forward over all of them. That forward is also how a model is trained: a causal mask makes
every position's prediction at once, so the comparison says as much about training as about reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvgen.cache.adapter import TransformersCache, continues_prefill, specs_for
from kvgen.cache.fingerprint import fingerprint
from kvgen.cache.layers import CannotTrimError
from kvgen.cache.manager import KVCache
from kvgen.cache.quirks import takes_padding
from kvgen.cache.saving import load_cache, open_for, save_cache
from kvgen.engine.forward import Forward
from kvgen.measure.checks import (
    BATCH,
    BYTES,
    CHUNK_SIZES,
    FORK,
    MEMORY_ERRORS,
    PADDING,
    PAST_THE_WINDOW,
    RESET,
    SAVE_AND_LOAD,
    TRAINING,
    TRIM,
    Outcome,
    by_position,
    chunks_of,
    differences,
    guarded,
    not_applicable,
    ones_around,
    told,
    unchanged_after_refusal,
)
from kvgen.measure.facts import is_spread
from kvgen.measure.verdict import largest_logit, tolerance
from kvgen.models.ranks import current

_BATCH_STEPS = 6
_PADDING = 3
_TURNS = 3


class Verifier:
    """The checks for one model on one sequence of ids.

    ``prompt`` of the ``ids`` are forwarded together first; the rest follows.
    """

    def __init__(
        self,
        model: Any,
        ids: list[int],
        prompt: int,
        limit: float | None = None,
        step: int = 256,
        longest: int = 1024,
        forward: Forward | None = None,
    ) -> None:
        """Logits may differ by ``limit``, by default what the model's dtype explains.

        ``step`` is the slots that buffers grow by. ``longest`` is how many tokens passing a window
        may take. ``forward`` is the one to verify, by default a plain one. Raises ``ModelError``
        for a model that the cache does not serve.
        """
        self._model = model
        self.forward = forward or Forward(model)
        self._specs = specs_for(model)
        self._many = continues_prefill(model, self._specs)
        self._pads = takes_padding(model)
        self._itemsize = model.dtype.itemsize
        self._ids = ids
        self._prompt = prompt
        self._step = step
        self._longest = longest
        self._parallel = self.forward.uncached_everywhere(ids)
        if not self._parallel.max().isfinite():
            raise self.forward.not_finite(ids, 0)
        dtype = str(model.dtype).removeprefix("torch.")
        self.limit = tolerance(dtype, largest_logit(self._parallel)) if limit is None else limit
        """Largest |Δlogit| that counts as the same."""

    def outcomes(self) -> Iterator[Outcome]:
        """Run every check, one after another."""
        yield guarded(TRAINING, self.stepwise)
        for size in CHUNK_SIZES:
            yield guarded(chunks_of(size), partial(self.chunked, size))
        yield guarded(PAST_THE_WINDOW, self.past_the_window)
        yield guarded(TRIM, self.trim_and_regenerate)
        yield guarded(RESET, self.reset_and_repeat)
        yield guarded(FORK, self.fork_is_independent)
        yield guarded(SAVE_AND_LOAD, self.save_and_load)
        yield guarded(BATCH, self.batch_against_alone)
        yield guarded(PADDING, self.left_padding)
        yield guarded(BYTES, self.bytes_follow_the_formula)

    def stepwise(self) -> Outcome:
        """The prompt together, then one token at a time, as the one masked forward of training."""
        return self._compare(TRAINING, self._feed(self._new_cache(), [self._prompt, *self._ones]))

    def chunked(self, size: int) -> Outcome:
        """Everything in pieces of ``size`` tokens."""
        name = chunks_of(size)
        if size > 1 and not self._many:
            return not_applicable(name, "the model does not continue its state over chunks")
        whole, rest = divmod(len(self._ids), size)
        sizes = [size] * whole + ([rest] if rest else [])
        return self._compare(name, self._feed(self._new_cache(), sizes))

    def past_the_window(self) -> Outcome:
        """Every window's length W, and twice W, passed one token at a time."""
        windows = sorted({spec.window for spec in self._specs if spec.window is not None})
        if not windows:
            return not_applicable(PAST_THE_WINDOW, "no layer of this model has a window")
        passed = [window for window in windows if window + 3 <= self._longest]
        if not passed:
            why = f"passing a window of {windows[0]:,} takes more than {self._longest:,} tokens"
            return not_applicable(PAST_THE_WINDOW, why)
        longest = min(2 * passed[-1] + 3, self._longest)
        ids = (self._ids * (longest // len(self._ids) + 1))[:longest]
        marks = [n * window for window in passed for n in (1, 2)]
        sizes = ones_around(marks, longest, whole=self._many)
        outcome = self._compare(
            PAST_THE_WINDOW,
            self._feed(self._new_cache(), sizes, ids),
            expected=self.forward.uncached_everywhere(ids),
        )
        left = [window for window in windows if window not in passed]
        if outcome.status == "pass" and left:
            detail = f"a window of {left[0]:,} takes more than {self._longest:,} tokens"
            return Outcome(outcome.check, "pass", outcome.max_abs_logit_difference, None, detail)
        return outcome

    def trim_and_regenerate(self) -> Outcome:
        """Take the last tokens back, forward others, take them back, forward the right ones."""
        cache = self._new_cache()
        self._run(cache, [self._prompt])
        try:
            self._run(cache, [1, 1])
            cache.kv.trim(2)
        except CannotTrimError as refusal:
            return unchanged_after_refusal(TRIM, cache.kv, self._prompt + 2, refusal)
        wrong = [self._ids[0]] * 2
        for token in wrong:
            self.forward.cached([token], cache)
        cache.kv.trim(2)
        return self._compare(TRIM, self._feed(cache, self._ones), self._prompt)

    def fork_is_independent(self) -> Outcome:
        """Tokens forwarded through a fork, turn by turn, leave the original as it was."""
        cache = self._new_cache()
        self._run(cache, [self._prompt])
        twin = TransformersCache(cache.kv.fork())

        def in_turns() -> Iterator[Tensor]:
            for turn, logits in enumerate(self._feed(cache, self._ones)):
                yield logits
                if turn < _TURNS:
                    self.forward.cached([self._ids[0]], twin)

        return self._compare(FORK, in_turns(), self._prompt)

    def reset_and_repeat(self) -> Outcome:
        """A cache that was used and reset gives what a new one gives."""
        cache = self._new_cache()
        self._run(cache, [self._prompt, 1, 1])
        cache.kv.reset()
        return self._compare(RESET, self._feed(cache, [self._prompt, *self._ones]))

    def save_and_load(self) -> Outcome:
        """A cache read back from a file goes on as the one that was written."""
        if current() is not None or is_spread(self._model):
            return not_applicable(SAVE_AND_LOAD, "a cache file is for a model on one device")
        cache, again = self._new_cache(), self._new_cache()
        self._run(cache, [self._prompt])
        own = fingerprint(self._model, None, self._specs, cache.kv.policy, "any")
        try:
            with TemporaryDirectory(prefix="kvgen-") as folder:
                path = Path(folder) / "cache"
                save_cache(path, cache.kv, self._ids[: self._prompt], own)
                load_cache(open_for(path, own), again.kv, self._model.device)
        except OSError as error:
            return not_applicable(SAVE_AND_LOAD, f"no file can be written here: {error.strerror}")
        return self._compare(SAVE_AND_LOAD, self._feed(again, self._ones), self._prompt)

    def batch_against_alone(self) -> Outcome:
        """Two sequences in one batch predict what each predicts alone."""
        ids = self._ids[: self._prompt + _BATCH_STEPS]
        other = ids[1:] + ids[:1]
        alone = torch.stack((self._parallel[: len(ids)], self.forward.uncached_everywhere(other)))
        return self._compare_rows(BATCH, [ids, other], [0, 0], alone)

    def left_padding(self) -> Outcome:
        """A sequence padded on its left, beside a longer one, predicts what it predicts alone."""
        if not self._pads:
            return not_applicable(PADDING, "the model counts its mask's columns in its own way")
        ids = self._ids[: self._prompt + _BATCH_STEPS]
        padded = ids[:1] * _PADDING + ids[:-_PADDING]
        alone = self._parallel[: len(ids)]
        shifted = torch.cat((alone[:_PADDING], alone[:-_PADDING]))
        return self._compare_rows(
            PADDING, [ids, padded], [0, _PADDING], torch.stack((alone, shifted))
        )

    def bytes_follow_the_formula(self) -> Outcome:
        """Bytes on the tensors equal the formula after every forward."""
        cache = self._new_cache()
        for _ in self._feed(cache, [self._prompt, *self._ones]):
            formula = cache.kv.bytes_formula(self._itemsize)
            if formula is None:
                return not_applicable(BYTES, "no formula is known for a layer of this model")
            if cache.kv.bytes_used != formula:
                detail = f"{cache.kv.bytes_used:,} bytes held, {formula:,} predicted"
                return Outcome(BYTES, "fail", position=cache.kv.position, detail=detail)
        return Outcome(BYTES, "pass")

    @property
    def _ones(self) -> list[int]:
        return [1] * (len(self._ids) - self._prompt)

    def _new_cache(self) -> TransformersCache:
        return TransformersCache(KVCache(self._specs, self._step))

    def _feed(
        self, cache: TransformersCache, sizes: list[int], ids: list[int] | None = None
    ) -> Iterator[Tensor]:
        """Forward the next ids in pieces of these sizes; logits ``[size, vocab]`` of each."""
        for size in sizes:
            begin = cache.kv.position
            piece = (ids or self._ids)[begin : begin + size]
            yield self.forward.cached_everywhere(piece, cache)

    def _run(self, cache: TransformersCache, sizes: list[int]) -> None:
        for _ in self._feed(cache, sizes):
            pass

    def _compare(
        self, name: str, run: Iterator[Tensor], first: int = 0, expected: Tensor | None = None
    ) -> Outcome:
        """Hold the logits of a run that begins at position ``first`` against the parallel ones.

        A run that breaks off has failed at the position it came to.
        """
        expected = self._parallel if expected is None else expected
        worst, position, failed = 0.0, first, None
        try:
            for logits in run:
                each = differences(logits, expected[position : position + len(logits)])
                wrong = (~(each <= self.limit)).nonzero()  # written so that a NaN fails
                if failed is None and len(wrong):
                    failed = position + int(wrong[0])
                worst = max(worst, float(each.nan_to_num(nan=float("inf")).max()))
                position += len(logits)
        except MEMORY_ERRORS:
            raise
        except Exception as error:
            return Outcome(name, "fail", worst or None, position, told(error))
        return Outcome(name, "pass" if failed is None else "fail", worst, failed)

    def _compare_rows(
        self, name: str, rows: list[list[int]], padding: list[int], alone: Tensor
    ) -> Outcome:
        """Hold a batch, stepped through a cache, against its rows run alone.

        What the model itself, without a cache, does not do is no fault of the cache.
        """

        def through_the_cache() -> Iterator[Tensor]:
            cache = self._new_cache()
            for size in [self._prompt] + [1] * (len(rows[0]) - self._prompt):
                begin = cache.kv.position
                pieces = [row[begin : begin + size] for row in rows]
                yield by_position(self.forward.rows(pieces, padding, cache), padding, begin)

        def without_one() -> Iterator[Tensor]:
            yield by_position(self.forward.rows(rows, padding), padding)

        expected = by_position(alone, padding)
        outcome = self._compare(name, through_the_cache(), expected=expected)
        if outcome.status == "fail":
            own = self._compare(name, without_one(), expected=expected)
            if own.status == "fail":
                return not_applicable(name, "the model itself predicts otherwise, cache or not")
        return outcome
