"""transformers' ways of computing the same tokens: its caches through kvgen's step loop, and its
``generate()`` as a user calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from kvgen.cache.adapter import cache_argument
from kvgen.cache.rivals import RivalCache
from kvgen.engine.decoder import Token
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler
from kvgen.measure.clock import Clock
from kvgen.measure.comparison_records import Kind
from kvgen.measure.contestants import (
    Contestant,
    ForcedSampler,
    StepContestant,
    TimedStep,
)
from kvgen.models import LoadedModel
from kvgen.models.quiet import quiet_libraries


class _RivalDecoder:
    """``Decoder``'s loop over a cache that is not ours."""

    def __init__(
        self, forward: Forward, ids: list[int], sampler: Sampler, cache: RivalCache
    ) -> None:
        self.ids = list(ids)
        self._forward, self._sampler, self._cache = forward, sampler, cache

    def step(self) -> Token:
        """Forward what is pending and append one token."""
        pending = self.ids[self._cache.position :]
        logits = self._forward.after(pending, self._cache.raw, self._cache.position)
        self._cache.advance(len(pending))
        token = Token(self._sampler.choose(logits, self.ids), logits)
        self.ids.append(token.id)
        return token


class _RivalMemory(Contestant):
    """What the contestants with one of the library's caches share."""

    cache: RivalCache

    def __init__(self, loaded: LoadedModel, kind: Kind, name: str, description: str) -> None:
        super().__init__(loaded, kind, name, description)
        self._filled = self.cache = RivalCache.growing(loaded.config)

    def fill(self, prefix: list[int], capacity: int) -> None:
        """Forward the prefix into a cache that runs copy."""
        self._filled = self.cache = self._empty(capacity)
        if prefix:
            self.forward.after(prefix, self._filled.raw, 0)
            self._filled.advance(len(prefix))

    def _empty(self, capacity: int) -> RivalCache:
        return RivalCache.growing(self.loaded.config)


class LibraryCache(_RivalMemory, StepContestant):
    """The library's growing cache through the same step loop."""

    def __init__(self, loaded: LoadedModel, name: str = "transformers") -> None:
        super().__init__(loaded, "transformers", name, "transformers' growing cache, same loop")

    def begin(self, ids: list[int], forced: list[int] | None) -> None:
        """A copy of the filled cache."""
        self.cache = self._filled.fork()
        sampler = ForcedSampler(forced)
        self.decoder = _RivalDecoder(self.forward, ids, sampler, self.cache)


class LibraryStaticCache(LibraryCache):
    """The library's preallocated cache, exactly as large as the run needs."""

    def __init__(self, loaded: LoadedModel, name: str = "transformers-static") -> None:
        super().__init__(loaded, name)
        self.facts.kind = "transformers-static"
        self.facts.description = "transformers' preallocated cache, same loop"

    def _empty(self, capacity: int) -> RivalCache:
        return RivalCache.static(self.loaded.config, capacity)


class LibraryGenerate(_RivalMemory):
    """``model.generate()``. Its tokens are timed as its streamer gets them."""

    def __init__(self, loaded: LoadedModel, name: str = "generate") -> None:
        super().__init__(loaded, "generate", name, "transformers' generate() as a user calls it")

    def begin(self, ids: list[int], forced: list[int] | None) -> None:
        """A copy of the filled cache, which generate() finds holds the beginning of ``ids``."""
        self.cache = self._filled.fork()
        self._ids, self._forced = list(ids), forced

    def steps(self, count: int, clock: Clock) -> Iterator[TimedStep]:
        """The whole call, then its steps one by one."""
        model = self.loaded.model
        settings = deepcopy(model.generation_config)
        # Every contestant goes on after an end-of-text id.
        settings.update(
            max_new_tokens=count, max_length=None, do_sample=False, eos_token_id=None,
            pad_token_id=0, temperature=None, top_k=None, top_p=None,
        )  # fmt: skip
        watch = _Watch(self._forced, clock)
        batch = torch.tensor([self._ids], device=self.loaded.device)
        with quiet_libraries():
            begin = clock.now()
            output = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                generation_config=settings,
                logits_processor=[watch],
                streamer=watch,
                **{cache_argument(model): self.cache.raw},
            )
        chosen = output[0, len(self._ids) :].tolist()
        forwarded = [len(self._ids) - self.cache.position] + [1] * (count - 1)
        self.cache.advance(sum(forwarded))
        for step, end in enumerate(watch.times):
            yield TimedStep(end - begin, watch.logits[step], chosen[step], forwarded[step])
            begin = end


class _Watch:
    """A logits processor that forces ids and a streamer that reads the clock, in one."""

    def __init__(self, forced: list[int] | None, clock: Clock) -> None:
        self.times: list[float] = []
        self.logits: list[Tensor] = []
        self._forced, self._clock = forced, clock
        self._prompt_seen = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        """Keep the logits ``[1, vocab]``; return scores that only the forced id can win."""
        self.logits.append(scores[0])
        if self._forced is None:
            return scores
        wanted = torch.full_like(scores, float("-inf"))
        wanted[0, self._forced[len(self.logits) - 1]] = 0
        return wanted

    def put(self, value: Tensor) -> None:
        """The prompt first, then every token."""
        if self._prompt_seen:
            self.times.append(self._clock.now())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""
