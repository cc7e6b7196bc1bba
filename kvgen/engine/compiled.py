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
from kvgen.engine.calls import Call, attending, standing_in
from kvgen.engine.compiling import compile_part, load_part
from kvgen.engine.forward import Forward
from kvgen.engine.graphs import StepGraphs
from kvgen.engine.parts import Part, parts_of
from kvgen.engine.traced import BLOCK, CannotCompileError
from kvgen.models.causal import rotary_change
from kvgen.models.types import ProgressCallback, no_progress

# Of the largest logit: twice the most that another order of summing has moved one.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 7e-2}
_FLOAT32_TOLERANCE = 1e-4

Run = Callable[[list[Tensor]], list[Tensor]]
"""A program: what it reads, one after another, and what it gives."""


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
        parts = parts_of(model, specs, lambda: self._two_steps(cache), self._step_call(cache))
        every = [*parts.layers, *(part for part in (parts.before, parts.after) if part)]
        different = {part.file: part for part in every}
        found = {file: load_part(part, model.device) for file, part in different.items()}
        missing = [part for file, part in different.items() if found[file] is None]
        for done, part in enumerate(missing):
            progress("compiling the decode step, once for this model", done, len(missing))
            compile_part(part, model, cache.kv)
            found[part.file] = load_part(part, model.device)
            if found[part.file] is None:
                raise CannotCompileError(
                    "gives programs that cannot be loaded; is there room for temporary files?"
                )
        loaded = {file: run for file, run in found.items() if run is not None}
        runs = [_bound(part, loaded[part.file]) for part in every]
        self._layers, self._sources = runs[: len(specs)], parts.recorded.flow.sources
        self._around = (runs[-2], runs[-1]) if parts.before else None
        # Where the model's own code runs around its layers, programs are called in parts' places.
        through = [] if parts.before else list(zip(every, runs, strict=True))
        self._modules = [part.module for part, _ in through]
        self._stand_ins = [
            self._stand_in(index, part, run, parts.recorded.as_tuple)
            for index, (part, run) in enumerate(through)
        ]
        self._kv: KVCache | None = None
        self._numbers = torch.arange(0, device=model.device)
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._graphs: StepGraphs | None = None
        self._check()
        if self._device.type == "cuda" and self._takes_positions:
            self._graphs = StepGraphs(len(self._specs), self._device)
            self._check()
        self.compilation = Compilation(time.perf_counter() - begin, len(different), len(missing))

    def cached(self, ids: list[int], cache: TransformersCache) -> Tensor:
        """As ``Forward.cached``; compiled where it is one id."""
        if len(ids) != 1 or not self._serves(cache):
            return super().cached(ids, cache)
        if self._graphs is not None:
            return self._replayed(ids[0], cache, self._graphs)
        with torch.inference_mode():
            token, position = (
                torch.tensor([[n]], device=self._device) for n in (ids[0], cache.kv.position)
            )
            logits = self._step(token, position, cache)
        cache.kv.advance(1)
        return logits

    def ready(self, cache: TransformersCache) -> None:
        """Grow the buffers and capture a graph now, where the next token would have to."""
        if self._graphs is None or not self._serves(cache):
            return
        slots = self._slots(cache.kv)
        for each in slots:
            each.make_room()
        # Repeated, it writes where nothing is held yet.
        self._graphs.set(0, cache.kv.position, [(0, each.capacity) for each in slots])
        self._capture(cache, self._graphs)

    def _serves(self, cache: TransformersCache) -> bool:
        return cache.kv.position > 0 and isinstance(cache.kv.policy, Blocks)

    def _replayed(self, token: int, cache: TransformersCache, graphs: StepGraphs) -> Tensor:
        """One token through the graph that belongs to the cache's buffers."""
        slots = self._slots(cache.kv)
        graphs.set(token, cache.kv.position, [each.claim() for each in slots])
        self._capture(cache, graphs)
        logits = graphs.replay(slots)
        cache.kv.advance(1)
        return logits

    def _capture(self, cache: TransformersCache, graphs: StepGraphs) -> None:
        slots = self._slots(cache.kv)
        self._blocks(max(each.capacity for each in slots) // BLOCK)  # made outside of the graph
        with torch.inference_mode():
            graphs.capture(slots, lambda: self._step(graphs.token, graphs.position, cache))

    def _step(self, token: Tensor, position: Tensor, cache: TransformersCache) -> Tensor:
        """The logits ``[vocab]`` after one token; both inputs are ``[1, 1]``."""
        self._kv = cache.kv
        self._places.clear()
        if self._around is None:
            return self._through_model(token, position, cache)
        before, after = self._around
        outside, hidden = before([token, position]), token
        for index, (layer, sources) in enumerate(zip(self._layers, self._sources, strict=True)):
            inputs = [hidden if place is None else outside[place] for place in sources]
            hidden = layer(inputs + self._place(index))[0]
        return after([token, position, hidden])[0][0, -1]

    def _through_model(self, token: Tensor, position: Tensor, cache: TransformersCache) -> Tensor:
        """As ``_step``, with the model's own code around the layers."""
        inputs = self._step_inputs(token, cache)
        if "position_ids" in inputs:
            inputs["position_ids"] = position
        with attending(self._model), standing_in(self._modules, self._stand_ins):
            logits: Tensor = self._model(**inputs).logits[0, -1]
        return logits

    def _step_inputs(self, token: Tensor, cache: TransformersCache) -> dict[str, Any]:
        return {
            "input_ids": token,
            **self._inputs(1, cache, cache.kv.position),
            "return_dict": True,
            **self._last_only,
        }

    def _step_call(self, cache: TransformersCache) -> Call | None:
        """A call of the whole model for one token, where it depends on no more than its tensors."""
        config = self._model.config.get_text_config(decoder=True)
        if not self._takes_positions or rotary_change(config) is not None:
            return None
        token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        return Call((), self._step_inputs(token, cache))

    def _slots(self, kv: KVCache) -> list[TokenSlots]:
        return [layer.pairs for layer in kv.layers if isinstance(layer.pairs, TokenSlots)]

    def _stand_in(self, index: int, part: Part, run: Run, as_tuple: bool) -> Callable[..., Any]:
        """What is called in a part's place."""

        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = [_at(path, args, kwargs) for path in part.call.where]
            if part.spec is None:
                return run(inputs)[0]
            result = run(inputs + self._place(index))[0]
            return (result,) if as_tuple else result

        return call

    def _place(self, layer: int) -> list[Tensor]:
        """A layer's buffers, which of their slots to read, and where the new token goes."""
        assert self._kv is not None
        slots = self._kv.layers[layer].pairs
        assert isinstance(slots, TokenSlots)
        if self._graphs is not None:  # all slots; those that may be read, the graph is told
            whole = self._blocks(slots.capacity // BLOCK)
            return [*slots.buffers(), whole, self._graphs.spans[layer]]
        span = slots.claim()
        if span not in self._places:  # once a step for all layers that are filled alike
            begin, end = span
            own = torch.tensor([begin, end - 1], device=self._device)
            self._places[span] = (self._blocks(-(-end // BLOCK)), own)
        return [*slots.buffers(), *self._places[span]]

    def _blocks(self, count: int) -> Tensor:
        """The numbers of the first ``count`` blocks' slots, ``[count, BLOCK]``."""
        if count * BLOCK > self._numbers.numel():
            self._numbers = torch.arange(2 * count * BLOCK, device=self._device)
        return self._numbers[: count * BLOCK].view(count, BLOCK)

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


def _bound(part: Part, program: Run) -> Run:
    """A part's program with its weights."""
    weights = list(part.named.values())
    return lambda inputs: program(weights + inputs)


def _at(path: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What lies at a path into ``(args, kwargs)``."""
    found: Any = (args, kwargs)
    for key in path:
        found = found[key]
    return found
