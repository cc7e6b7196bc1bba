"""A few tokens walked through, with everything about them watched. One pass watches and proves;
a second, unwatched, is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgen.cache.adapter import specs_for
from kvgen.cache.manager import KVCache
from kvgen.engine.forward import Forward
from kvgen.engine.prompt import check_fits, encode
from kvgen.errors import UsageError
from kvgen.measure import holdings
from kvgen.measure.boundary import boundary, measured_compute
from kvgen.measure.clock import Clock, DeviceClock
from kvgen.measure.curve import time_curve
from kvgen.measure.environment import environment
from kvgen.measure.explanation import (
    Attention,
    Choice,
    Explanation,
    Stage,
    TextToken,
    Training,
    Twin,
    Work,
)
from kvgen.measure.facts import model_facts
from kvgen.measure.roofline import WeightReads, measured_bandwidth
from kvgen.measure.verdict import largest_logit, tolerance
from kvgen.measure.watch import Seen, Watch, WatchedCache
from kvgen.models import LoadedModel
from kvgen.storage import cache_root

DEFAULT_NEW_TOKENS = 4
_TOP = 3


@dataclass(frozen=True)
class ExplainOptions:
    """What to walk through. ``layer`` is by default the first that shows the most."""

    prompt: str
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    layer: int | None = None
    chat: bool = False
    timings: bool = True
    parse_special: bool = False


class ExplanationRun:
    """Watches ``max_new_tokens`` greedy tokens being made, with the cache and without."""

    def __init__(
        self, loaded: LoadedModel, options: ExplainOptions, clock: Clock | None = None
    ) -> None:
        """Raises ``InputError`` if the prompt does not fit, ``UsageError`` for an absent layer and
        ``ModelError`` for a model that the cache does not serve.
        """
        self._loaded, self._options = loaded, options
        self._model: Any = loaded.model
        self._clock = clock or DeviceClock(loaded.device)
        self._specs = specs_for(loaded.model)
        self._ids = encode(
            loaded.tokenizer, options.prompt, options.chat, parse_special=options.parse_special
        )
        check_fits(len(self._ids), options.max_new_tokens, loaded.context_limit)
        self._prompt = len(self._ids)
        self._forward = Forward(loaded.model, "model")
        self._weights = WeightReads(loaded.model)
        self._cache = WatchedCache(KVCache(self._specs))
        self._layer = _chosen_layer(options.layer, self._specs)
        self._rows: list[Tensor] = []

    def explain(self) -> Explanation:
        """Everything, as one record."""
        record = self._empty()
        largest = 0.0
        for _ in range(self._options.max_new_tokens):
            stage = self._stage(record)
            record.stages.append(stage)
            largest = max(largest, largest_logit(self._rows[-1]))
            if stage.chosen.id in self._loaded.stop_ids:
                if len(record.stages) < self._options.max_new_tokens:
                    record.notes.append("the model ended its text here")
                break
        record.tolerance = tolerance(self._loaded.dtype_name, largest)
        record.tokens = self._tokens()
        _lengthen(record)
        record.training = self._training(record.tolerance)
        compute = None
        if self._options.timings:
            compute = measured_compute(self._loaded.device, self._loaded.dtype)
            time_curve(record, self._forward, self._specs, self._ids, self._clock)
        last = record.stages[-1]
        if last.index == 0:
            record.notes.append(
                "no decode step was taken, so there is nothing saved to account for"
            )
            return record
        record.boundary = boundary(
            last,
            self._weights,
            self._specs,
            self._loaded.dtype.itemsize,
            record.environment.bandwidth_bytes_per_s,
            compute,
        )
        return record

    def _empty(self) -> Explanation:
        loaded, bandwidth = self._loaded, None
        if self._options.timings:
            bandwidth = measured_bandwidth(loaded.device, torch.get_num_threads(), cache_root())
        itemsize = loaded.dtype.itemsize
        return Explanation(
            model=model_facts(loaded, self._weights.total, self._cache.kv),
            environment=environment(self._forward, loaded, bandwidth),
            prompt=self._options.prompt,
            prompt_tokens=self._prompt,
            layer=self._layer,
            tolerance=0.0,
            layers=[holdings.layer_facts(i, s, itemsize) for i, s in enumerate(self._specs)],
        )

    def _stage(self, record: Explanation) -> Stage:
        """One forward through the cache and its twin, and the token they lead to."""
        kv = self._cache.kv
        start, fed = kv.position, self._ids[kv.position :]
        used = kv.bytes_used
        was = [holdings.before(layer) for layer in kv.layers]
        logits, seen = self._watched(fed)
        self._rows.append(logits)
        if not logits[-1].max().isfinite():
            raise self._forward.not_finite(self._ids, len(record.stages))
        states = [holdings.after(i, la, was[i]) for i, la in enumerate(kv.layers)]
        attention = _attention(self._layer, seen, len(fed))
        work = record.work
        work.cached += seen.input_shape[0] * seen.input_shape[1]
        twin = self._twin(work, start, logits[-1])
        choices = self._choices(logits[-1])
        self._ids.append(choices[0].id)
        return Stage(
            index=len(record.stages),
            first_position=start,
            tokens=len(fed),
            input_shape=seen.input_shape,
            attention=attention,
            layers=states,
            kv_bytes_before=used,
            kv_bytes_used=kv.bytes_used,
            kv_bytes_allocated=kv.bytes_allocated,
            choices=choices,
            chosen=choices[0],
            cells=holdings.cells(
                self._specs[self._layer], start, len(fed), attention.keys_read, start + len(fed)
            ),
            operations=seen.operations,
            attention_operations=seen.attention_operations,
            latency_s=None,
            twin=twin,
        )

    def _watched(self, fed: list[int]) -> tuple[Tensor, Seen]:
        watch = Watch(self._model, len(fed))
        self._cache.watch = watch
        with watch:
            logits = self._forward.cached_everywhere(fed, self._cache)
        self._cache.watch = None
        return logits, watch.seen

    def _twin(self, work: Work, start: int, cached: Tensor) -> Twin:
        with Watch(self._model, len(self._ids)) as watch:
            logits = self._forward.uncached(self._ids)
        seen = watch.seen
        tokens = seen.input_shape[0] * seen.input_shape[1]
        work.uncached += tokens
        work.repeated += start
        return Twin(
            input_shape=seen.input_shape,
            tokens=tokens,
            repeated=start,
            repeated_so_far=work.repeated,
            max_abs_logit_difference=_difference(cached, logits),
            same_token=bool(cached.argmax() == logits.argmax()),
            cells=holdings.twin_cells(start, tokens - start, tokens),
            operations=seen.operations,
            attention_operations=seen.attention_operations,
            latency_s=None,
        )

    def _choices(self, logits: Tensor) -> list[Choice]:
        scores = logits.float()
        chances = scores.softmax(dim=-1)
        best = scores.topk(min(_TOP, scores.shape[-1])).indices.tolist()
        return [Choice(i, self._shown(i), float(scores[i]), float(chances[i])) for i in best]

    def _shown(self, token_id: int) -> str:
        shown: str = self._loaded.tokenizer.decode([token_id], skip_special_tokens=False)
        return shown

    def _tokens(self) -> list[TextToken]:
        return [
            TextToken(position, token, self._shown(token), position >= self._prompt)
            for position, token in enumerate(self._ids)
        ]

    def _training(self, limit: float) -> Training:
        """One masked forward over all fed tokens gives what the stages gave one by one."""
        parallel = self._forward.uncached_everywhere(self._ids[:-1])
        difference = _difference(torch.cat(self._rows), parallel)
        return Training(len(parallel), difference, difference <= limit)


def _chosen_layer(asked: int | None, specs: list[Any]) -> int:
    """The layer asked for, else the first windowed one, else the first with pairs, else layer 0."""
    if asked is not None:
        if not 0 <= asked < len(specs):
            raise UsageError(f"--layer {asked}: the cache has layers 0 to {len(specs) - 1}")
        return asked
    pairs = [index for index, spec in enumerate(specs) if spec.has_pairs]
    windowed = [index for index in pairs if specs[index].window is not None]
    return (windowed or pairs or [0])[0]


def _attention(layer: int, seen: Seen, fed: int) -> Attention:
    at = seen.layers.get(layer)
    if at is None:
        return Attention(layer, None, None, None, None, None)
    read = at.keys_returned if at.keys_returned is not None else at.keys_attended
    stored = None if read is None else read - fed
    return Attention(layer, at.query_shape, at.key_shape, at.value_shape, read, stored)


def _lengthen(record: Explanation) -> None:
    """Every row of the grid to the length of the last: what is still ahead of it."""
    total = record.stages[-1].twin.tokens
    for stage in record.stages:
        for row in (stage.cells, stage.twin.cells):
            row += ["ahead"] * (total - len(row))


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max())
