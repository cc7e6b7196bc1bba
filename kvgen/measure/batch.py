"""Many prompts, one model: rows decoded together, shared prefixes forwarded once, each measured.

Every prompt is prefilled by itself, on a copy of the longest stored prefix; then it joins the rows
that are decoded together. Row by row the results are the caller's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvgen.cache.adapter import TransformersCache, policy_for, specs_for
from kvgen.cache.manager import KVCache
from kvgen.cache.prefix_index import PrefixIndex
from kvgen.cache.prefix_plan import PrefixPlan
from kvgen.cache.prefix_spans import PrefixSpans
from kvgen.cache.reuse import Receipt
from kvgen.cache.rows import keeps_every_slot
from kvgen.engine.answer import Answer
from kvgen.engine.batch import Row, RowBatch
from kvgen.engine.forward import Forward, check_piece
from kvgen.engine.sampling import Sampler
from kvgen.measure.batch_prompts import BatchOptions, Prompt, prepare_prompts, unfinished
from kvgen.measure.batch_records import BatchSummary, RowResult, Timing
from kvgen.measure.clock import Clock, DeviceClock
from kvgen.measure.environment import environment
from kvgen.measure.facts import model_facts
from kvgen.measure.guard import Demand, check_before_growing, free_bytes
from kvgen.measure.requests import Id, Request, check_ids
from kvgen.measure.roofline import WeightReads
from kvgen.measure.run import RANDOM_WEIGHTS
from kvgen.measure.together import why_not_shared, why_not_together
from kvgen.measure.warmup import warm_up
from kvgen.models import LoadedModel

# Of the memory that is free, what stored prefixes may take where nobody said.
_BUDGET_PART = 4


@dataclass
class _InFlight:
    """A row that is being decoded."""

    prompt: Prompt
    row: Row
    answer: Answer
    receipt: Receipt
    timing: Timing
    first_at: float


class BatchRun:
    """A batch in progress. Iterate ``rows`` for the results; ``summary`` then has the sums."""

    def __init__(
        self,
        loaded: LoadedModel,
        requests: Sequence[Request],
        options: BatchOptions | None = None,
        finished: Mapping[Id, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Tokenizes everything. ``rejected`` then lists the requests that cannot be served.

        ``finished`` are the results of an earlier run, their ``request`` by id; these are skipped.
        Raises ``UsageError`` where one of them was made otherwise, and where two ids are the same;
        ``InputError`` where the rows together do not fit into memory.
        """
        check_ids(requests)
        self._loaded, self._options = loaded, options or BatchOptions()
        self._clock = clock or DeviceClock(loaded.device)
        self._forward = Forward(loaded.model, loaded.attention, loaded.products)
        self._specs = specs_for(loaded.model)
        self._policy = policy_for(loaded.model, self._options.cache)
        check_piece(loaded.model, self._specs, self._options.prefill_chunk)
        prompts, self.rejected = prepare_prompts(loaded, requests, self._options)
        self._prompts = unfinished(prompts, finished or {})
        if self._prompts and not self._options.force:
            self._check_memory()
        size, shared, notes = self._what_suits()
        self.summary = BatchSummary(
            model=model_facts(loaded, WeightReads(loaded.model).total, self._new_cache()),
            environment=environment(self._forward, loaded),
            batch_size=size,
            shared=shared,
            already_finished=len(prompts) - len(self._prompts),
            rejected=len(self.rejected),
            notes=notes,
        )
        self._plan = PrefixPlan([p.ids for p in self._prompts] if self.summary.shared else [])
        self._every_slot = keeps_every_slot(self._specs, self._policy)
        budget = self._budget()
        self._stored: PrefixIndex | PrefixSpans = (
            PrefixSpans(self._new_cache(), budget) if self._every_slot else PrefixIndex(budget)
        )

    @property
    def total(self) -> int:
        """Prompts that this run has to finish."""
        return len(self._prompts)

    def rows(self) -> Iterator[RowResult]:
        """Run; yields each result as soon as it is complete, which is not the input's order."""
        waiting = deque(self._prompts)
        batch = RowBatch(self._forward, min(self.summary.batch_size, self.total))
        flying: dict[Row, _InFlight] = {}
        self._began = self._clock.now()
        while waiting or flying:
            while waiting and len(flying) < self.summary.batch_size:
                begun, cache = self._begin(waiting.popleft(), batch)
                if begun.answer.reason is not None:
                    yield self._ended(begun)
                    continue
                joining = self._clock.now()
                batch.join(begun.row, cache)
                begun.timing.share_s += self._clock.now() - joining
                flying[begun.row] = begun
            if flying:
                yield from self._step(batch, flying)

    def _step(self, batch: RowBatch, flying: dict[Row, _InFlight]) -> list[RowResult]:
        """One token for every row; the results of those that it completes."""
        begin = self._clock.now()
        rows, tokens = batch.rows, batch.step()
        share = (self._clock.now() - begin) / len(rows)
        self._note_bytes(batch.bytes_allocated)
        ended = []
        for row, token in zip(rows, tokens, strict=True):
            one = flying[row]
            one.timing.share_s += share
            if one.answer.push(token):
                batch.leave(row)
                ended.append(self._ended(flying.pop(row)))
        return ended

    def _begin(self, prompt: Prompt, batch: RowBatch) -> tuple[_InFlight, KVCache]:
        """Prefill: the row with its first token, and the cache of all tokens before it."""
        begin = self._clock.now()
        cache, logits, receipt = self._prefill(prompt.ids)
        row = Row(list(prompt.ids), Sampler(prompt.sampling))
        token = batch.choose(row, logits)
        now = self._clock.now()
        ends = frozenset() if self._options.ignore_eos else self._loaded.stop_ids
        answer = Answer(self._loaded.tokenizer, prompt.ids, prompt.new_tokens, ends, prompt.stop)
        answer.push(token)
        timing = Timing(begin - self._began, now - begin, None, now - begin)
        return _InFlight(prompt, row, answer, receipt, timing, now), cache

    def _prefill(self, ids: list[int]) -> tuple[KVCache, torch.Tensor, Receipt]:
        """Forward what no stored prefix has, and store what later prompts need."""
        if not self.summary.shared:
            cache = self._new_cache()
            return cache, self._extend(ids, TransformersCache(cache)), Receipt(len(ids))
        turn = self._plan.next(ids)
        found, receipt = self._stored.take(ids)
        cache = self._new_cache() if found is None else found
        if turn.finished_with:
            self._stored.drop(ids[: turn.start])
        stops = [stop for stop in turn.stops if stop > cache.position]
        ends = [len(ids)] if self._every_slot else sorted({*stops, len(ids)})
        adapter, seconds = TransformersCache(cache), receipt.saved_s or 0.0
        for end in ends:
            first = cache.position
            begin = self._clock.now()
            logits = self._extend(ids[first:end], adapter)
            took = self._clock.now() - begin
            for stop in stops:
                if first < stop <= end:
                    part = took * (stop - first) / (end - first)
                    self._stored.add(ids[:stop], cache, seconds + part)
            seconds += took
        return cache, logits, receipt

    def _extend(self, ids: list[int], cache: TransformersCache) -> torch.Tensor:
        return self._forward.extend(ids, cache, self._options.prefill_chunk)

    def _ended(self, one: _InFlight) -> RowResult:
        """The result, complete, and counted."""
        prompt, answer, now = one.prompt, one.answer, self._clock.now()
        assert answer.reason is not None
        if len(answer.ids) > 1:
            one.timing.tpot_s = (now - one.first_at) / (len(answer.ids) - 1)
        summary = self.summary
        summary.prompts += 1
        summary.prompt_tokens += one.receipt.submitted
        summary.reused_tokens += one.receipt.reused
        summary.computed_tokens += one.receipt.computed
        summary.saved_s += one.receipt.saved_s or 0.0
        summary.new_tokens += len(answer.ids)
        summary.wall_s = now - self._began
        return RowResult(
            id=prompt.id,
            request=prompt.digest,
            input=prompt.input,
            prompt_tokens=len(prompt.ids),
            max_new_tokens=prompt.new_tokens,
            seed=one.row.sampler.seed,
            text=answer.text,
            new_ids=answer.ids,
            finish_reason=answer.reason,
            stop_string=answer.stop_string,
            receipt=one.receipt,
            timing=one.timing,
        )

    def _note_bytes(self, in_flight: int) -> None:
        held = in_flight + self._stored.bytes_allocated
        self.summary.kv_bytes_peak = max(self.summary.kv_bytes_peak, held)

    def _new_cache(self) -> KVCache:
        return self._policy.make(self._specs)

    def _what_suits(self) -> tuple[int, bool, list[str]]:
        """Warm up; how many rows the model decodes together and whether its prefixes are shared,
        and what a reader must know.
        """
        loaded, options, specs = self._loaded, self._options, self._specs
        size, shared, notes = options.batch_size, options.share_prefix, []
        longest = max((p.tokens for p in self._prompts), default=0)
        if self._prompts:
            ids = self._prompts[0].ids
            warm_up(loaded, self._forward, ids, self._new_cache())
            if size > 1 and (
                why := why_not_together(loaded, self._forward, specs, self._policy, ids, longest)
            ):
                size = 1
                notes.append(f"rows run one at a time: {why}")
        if shared and (why := why_not_shared(loaded, specs, longest)):
            shared = False
            notes.append(f"no prefix is shared: {why}")
        if self._policy.note is not None:
            notes.append(self._policy.note)
        if loaded.source.kind == "random weights":
            notes.append(RANDOM_WEIGHTS)
        return size, shared, notes

    def _check_memory(self) -> None:
        longest = max(prompt.tokens for prompt in self._prompts)
        chunk = self._options.prefill_chunk or max(len(prompt.ids) for prompt in self._prompts)
        rows = min(self._options.batch_size, len(self._prompts))
        check_before_growing(self._loaded, self._specs, Demand(longest, self._policy, chunk, rows))

    def _budget(self) -> int | None:
        if self._options.prefix_budget is not None:
            return self._options.prefix_budget
        free = free_bytes(str(self._loaded.device))
        return None if free is None else free // _BUDGET_PART
