"""The decode step as compiled programs: the forward of one token after the cache.

Prompts, and everything else that is not a single token, run as ever. The programs read and write
the cache's own buffers, so what was compiled shows nowhere but in the time. Buffers may have any
capacity: growing compiles nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import LayerSpec
from kvgen.cache.stepwise import Blocks
from kvgen.engine.calls import attending, standing_in
from kvgen.engine.compiling import Part, compile_part, load_part, parts_of
from kvgen.engine.forward import Forward
from kvgen.engine.traced import BLOCK, CannotCompileError
from kvgen.models.types import ProgressCallback, no_progress

# Of the largest logit: twice the most that another order of summing has moved one.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 7e-2}
_FLOAT32_TOLERANCE = 1e-4


class Compilation(NamedTuple):
    """What it took to have a compiled step: how many programs it is made of (layers that are alike
    share one), and how many of them were compiled now rather than found on disk.
    """

    compile_s: float
    programs: int
    compiled: int


class CompiledForward(Forward):
    """A ``Forward`` whose single tokens are compiled, after a cache in ``BLOCK``s."""

    def __init__(
        self,
        model: Any,
        specs: Sequence[LayerSpec],
        progress: ProgressCallback = no_progress,
    ) -> None:
        """Finds the programs on disk, or compiles them, which takes from seconds to minutes.

        Raises ``CannotCompileError`` with the reason why this model's step cannot be compiled, and
        ``UsageError`` where there is no compiler.
        """
        super().__init__(model)
        self.attention = "kvgen, compiled"
        begin = time.perf_counter()
        self._specs = tuple(specs)
        cache = self._new_cache()
        parts, self._tuples = parts_of(model, specs, lambda: self._two_steps(cache))
        files = list(dict.fromkeys(part.file for part in parts))
        missing = {part.file: part for part in parts if not part.file.is_file()}
        for done, part in enumerate(missing.values()):
            progress("compiling the decode step, once for this model", done, len(missing))
            compile_part(part, model, cache.kv)
        runs = {part.file: load_part(part, model.device) for part in parts}
        self._modules = [part.module for part in parts]
        self._stand_ins = [self._stand_in(i, p, runs[p.file]) for i, p in enumerate(parts)]
        self._kv: KVCache | None = None
        self._numbers = torch.arange(0, device=model.device)
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._check()
        self.compilation = Compilation(time.perf_counter() - begin, len(files), len(missing))

    def cached(self, ids: list[int], cache: TransformersCache) -> Tensor:
        """As ``Forward.cached``; compiled where it is one id."""
        if len(ids) != 1 or not cache.kv.position or not isinstance(cache.kv.policy, Blocks):
            return super().cached(ids, cache)
        self._kv = cache.kv
        self._places.clear()
        with attending(self._model), standing_in(self._modules, self._stand_ins):
            return super().cached(ids, cache)

    def _stand_in(
        self, index: int, part: Part, run: Callable[[list[Tensor]], list[Tensor]]
    ) -> Callable[..., Any]:
        """What is called in a part's place."""
        weights, where = part.weights, part.call.where
        as_tuple = self._tuples and part.spec is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = [*weights, *(_at(path, args, kwargs) for path in where)]
            if part.spec is not None:
                inputs += self._place(index)
            result = run(inputs)[0]
            return (result,) if as_tuple else result

        return call

    def _place(self, layer: int) -> list[Tensor]:
        """A layer's buffers, which of their slots to read, and where the new token goes."""
        assert self._kv is not None
        slots = self._kv.layers[layer].pairs
        assert isinstance(slots, TokenSlots)
        span = slots.claim()
        if span not in self._places:
            self._places[span] = self._described(*span)
        return [*slots.buffers(), *self._places[span]]

    def _described(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        blocks = -(-end // BLOCK)
        if blocks * BLOCK > self._numbers.numel():
            self._numbers = torch.arange(2 * blocks * BLOCK, device=self._device)
        span = torch.tensor([begin, end - 1], device=self._device)
        return self._numbers[: blocks * BLOCK].view(blocks, BLOCK), span

    def _new_cache(self) -> TransformersCache:
        return TransformersCache(Blocks(block=BLOCK).make(self._specs))

    def _two_steps(self, cache: TransformersCache) -> None:
        for token in (0, 1):
            Forward.cached(self, [token], cache)

    def _check(self) -> None:
        """Hold a compiled step against the model's own. Raises ``CannotCompileError``."""
        caches = [self._new_cache(), self._new_cache()]
        for cache in caches:
            Forward.cached(self, [0, 1, 2], cache)
        own = [Forward.cached(self, [token], caches[0]) for token in (3, 4)]
        ours = [self.cached([token], caches[1]) for token in (3, 4)]
        limit = _TOLERANCE.get(own[0].dtype, _FLOAT32_TOLERANCE)
        for one, other in zip(own, ours, strict=True):
            off = float((one - other).abs().max())
            if not off <= limit * max(1.0, float(one.abs().max())):  # so that a NaN is off too
                raise CannotCompileError(f"computes something else when compiled (by {off:.1e})")


def _at(path: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What lies at a path into ``(args, kwargs)``."""
    found: Any = (args, kwargs)
    for key in path:
        found = found[key]
    return found
