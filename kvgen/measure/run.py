"""One measured generation: the engine's steps between two readings of the clock, each with its
record. Text comes out piece by piece; who shows it, and how, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from kvgen.cache.adapter import policy_for, specs_for
from kvgen.cache.policies import DEFAULT
from kvgen.engine.answer import Answer
from kvgen.engine.decoder import Decoder
from kvgen.engine.forward import Forward, check_piece
from kvgen.engine.prompt import check_fits, check_known, encode
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.measure.clock import Clock, clock_for
from kvgen.measure.compilation import compiled_or_not
from kvgen.measure.environment import environment
from kvgen.measure.facts import device_note, is_spread, model_facts, rank_shares
from kvgen.measure.guard import Demand, check_before_growing
from kvgen.measure.prompt_cache import PromptCache
from kvgen.measure.recompute import KeptLogits, fill_in, recompute
from kvgen.measure.records import Generation, Kept, Reuse, Step, Totals
from kvgen.measure.roofline import WeightReads, measured_bandwidth
from kvgen.measure.verdict import first_rescaled
from kvgen.measure.warmup import warm_up
from kvgen.models import LoadedModel
from kvgen.models.types import ProgressCallback, no_progress
from kvgen.storage import cache_root

DEFAULT_NEW_TOKENS = 64
RANDOM_WEIGHTS = "random weights: time and bytes are real, the text means nothing"
_HANDFUL = 5
_KEPT_FOR_SAMPLE = 16
_KEPT_BYTES = 512 * 1024 * 1024
# Recomputing may take as long as the generation it explains, and this much in any case.
_LEAST_BUDGET_S = 3.0


@dataclass(frozen=True)
class GenerationOptions:
    """What to generate and what to find out about it."""

    prompt: str
    max_new_tokens: int | None = None
    chat: bool = False
    system: str | None = None
    parse_special: bool = False
    """Read special tokens that the prompt spells out as what they name."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cached: bool = True
    cache: str = DEFAULT
    """The storage policy with its options, as ``find_policy`` reads it."""
    force: bool = False
    """Go on where memory is predicted not to suffice."""
    compiled: bool = False
    """Compile the decode step, where the model allows it; needs the cache, and the policy step."""
    prefill_chunk: int | None = None
    recompute: Literal["sampled", "all", "off"] = "sampled"
    warmup: bool = True
    prompt_cache: Path | None = None
    """A file to take the beginning of the prompt from, if it is there, and to leave the cache in;
    needs the cache."""
    prompt_cache_read_only: bool = False


class GenerationRun:
    """A generation in progress. Iterate ``pieces`` for the text, then ask for ``finish``."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: GenerationOptions,
        clock: Clock | None = None,
        progress: ProgressCallback = no_progress,
    ) -> None:
        """Tokenizes the prompt and warms up. Raises ``InputError`` if the prompt does not fit.

        ``progress`` hears of what takes long before the first token.
        """
        self._loaded = loaded
        self._options = options
        self._clock = clock or clock_for(loaded.device)
        begin = self._clock.now()
        given = (options.prompt, options.chat, options.system, options.parse_special)
        ids = encode(loaded.tokenizer, *given)
        self._tokenize_s = self._clock.now() - begin
        check_known(ids, loaded.vocabulary)
        room = check_fits(len(ids), options.max_new_tokens, loaded.context_limit)
        wanted = options.max_new_tokens or min(DEFAULT_NEW_TOKENS, room or DEFAULT_NEW_TOKENS)

        self._weights = WeightReads(loaded.model)
        policy = policy_for(loaded.model, options.cache) if options.cached else None
        specs = specs_for(loaded.model) if options.cached else []
        compilation = reason = None
        if options.compiled and policy is not None:
            chosen = compiled_or_not(loaded, policy, specs, progress)
            self._forward, policy, compilation, reason = chosen
        else:
            self._forward = Forward(loaded.model, loaded.attention, loaded.products)
        chunk = options.prefill_chunk
        check_piece(loaded.model, specs, chunk)
        # The last new token is never forwarded, so it is never stored.
        tokens = len(ids) + wanted - 1
        self._cache = policy.for_tokens(tokens).make(specs) if policy else None
        self._file: PromptCache | None = None
        reuse = Reuse(len(ids), 0, 0, len(ids))
        if options.prompt_cache is not None and self._cache is not None:
            self._file = PromptCache(
                options.prompt_cache,
                not options.prompt_cache_read_only,
                loaded,
                self._forward.stored_as,
                self._cache,
                self._clock,
            )
            reuse = self._file.take(ids, options.chat)
        if not options.force and not is_spread(loaded.model):
            check_before_growing(loaded, specs, Demand(tokens, policy, chunk or reuse.computed))
        sampler = Sampler(options.sampling)
        snapshot = self._file is not None and self._file.wants_snapshot(tokens)
        self._decoder = Decoder(self._forward, ids, sampler, self._cache, chunk, snapshot)
        ends = frozenset() if options.ignore_eos else loaded.stop_ids
        self._answer = Answer(loaded.tokenizer, ids, wanted, ends, options.stop)
        self._kept = KeptLogits(self._kept_limit(wanted))
        self._detokenize_s = 0.0
        bandwidth = measured_bandwidth(loaded.device, torch.get_num_threads(), cache_root())
        if options.warmup:
            warm_up(loaded, self._forward, ids, policy.make(specs) if policy else None)
        self.record = Generation(
            model=model_facts(loaded, self._weights.total, self._cache),
            environment=environment(self._forward, loaded, bandwidth),
            cached=options.cached,
            cache=options.cache if options.cached else None,
            prompt=options.prompt,
            prompt_tokens=len(ids),
            prompt_ids=ids,
            max_new_tokens=wanted,
            prefill_chunk=options.prefill_chunk,
            sampling=asdict(options.sampling) | {"seed": sampler.seed},
            reuse=reuse,
            compilation=compilation,
        )
        if reason is not None:
            self.record.notes.append(reason)
        if policy is not None and policy.note is not None:
            self.record.notes.append(policy.note)
        if loaded.source.kind == "random weights":
            self.record.notes.append(RANDOM_WEIGHTS)

    def pieces(self) -> Iterator[str]:
        """Generate; yield after every step the text that may now be shown, which may be empty."""
        while self._answer.reason is None:
            self._step(len(self.record.steps))
            yield self._new_text()

    def interrupted(self, why: Literal["interrupted", "memory"] = "interrupted") -> str:
        """End the generation where it stands; the last text that may be shown."""
        self._answer.close()
        self.record.finish_reason = why
        return self._new_text()

    def finish(self) -> Generation:
        """The record, complete, after recomputing without a cache what the options ask for."""
        record = self.record
        self._keep()
        if record.finish_reason == "interrupted":
            record.notes.append("interrupted: nothing was recomputed without a cache")
        elif record.finish_reason == "memory":
            record.notes.append(
                f"out of memory after {len(record.steps):,} new tokens: nothing was recomputed"
            )
        elif record.steps:
            self._recompute()
        if self._cache is not None:
            record.kv_bytes_formula = self._cache.bytes_formula(self._loaded.dtype.itemsize)
        if record.finish_reason != "memory":  # which befalls one rank, not all
            itemsize = self._loaded.dtype.itemsize
            record.ranks = rank_shares(self._weights.total, self._cache, itemsize)
        if self._cache is not None and is_spread(self._loaded.model):
            record.notes.append(device_note(self._cache))
        if record.steps:
            record.totals = self._totals()
        return record

    def _keep(self) -> None:
        """Leave the cache in the prompt-cache file, once."""
        record = self.record
        if self._file is None or not self._file.writes or record.kept or record.reuse is None:
            return
        prefill_s = record.steps[0].latency_s if record.steps else None
        snapshot = self._decoder.snapshot
        record.kept = Kept(str(self._file.path))
        self._file.keep(record.kept, snapshot, self._decoder.ids, record.reuse, prefill_s)

    def _new_text(self) -> str:
        """What may be shown now and was not yet."""
        shown = len(self.record.text)
        self.record.text = self._answer.text
        return self.record.text[shown:]

    def _step(self, index: int) -> None:
        """One token and its record."""
        record, cache = self.record, self._cache
        held_before = cache.position if cache is not None else 0
        self._decoder.ready()
        begin = self._clock.now()
        token = self._decoder.step()
        latency = self._clock.now() - begin
        self._kept.add(index, token.logits)

        reading = self._clock.now()
        self._answer.push(token.id)
        shown = self._loaded.tokenizer.decode([token.id], skip_special_tokens=False)
        self._detokenize_s += self._clock.now() - reading

        position = record.prompt_tokens + index
        forwarded = position - held_before
        used = cache.bytes_used if cache is not None else 0
        read = self._weights.per_forward(forwarded) + used
        bandwidth = record.environment.bandwidth_bytes_per_s
        record.steps.append(
            Step(
                index=index,
                token_id=token.id,
                token=shown,
                text=self._answer.piece,
                position=position,
                latency_s=latency,
                forwarded_tokens=forwarded,
                cached_tokens=cache.position if cache is not None else 0,
                kv_bytes_used=used,
                kv_bytes_allocated=cache.bytes_allocated if cache is not None else 0,
                bytes_read=read,
                bandwidth_share=read / latency / bandwidth if bandwidth and latency else None,
            )
        )
        record.finish_reason = self._answer.reason or record.finish_reason
        record.stop_string = self._answer.stop_string

    def _kept_limit(self, new_tokens: int) -> int:
        mode = self._options.recompute
        if mode == "sampled":
            return _KEPT_FOR_SAMPLE
        vocabulary = int(self._loaded.config.vocab_size) * self._loaded.dtype.itemsize
        return 2 if mode == "off" else max(2, min(new_tokens + 1, _KEPT_BYTES // vocabulary))

    def _recompute(self) -> None:
        record, mode = self.record, self._options.recompute
        if not record.cached:
            fill_in(record.steps, {step.index: step.latency_s for step in record.steps})
            return
        if mode == "off":
            return
        took = sum(step.latency_s for step in record.steps)
        found = recompute(
            self._forward.uncached,
            self._decoder.ids,
            record.prompt_tokens,
            self._kept.by_step(),
            self._clock,
            self._loaded.dtype_name,
            budget_s=max(_LEAST_BUDGET_S, took) if mode == "sampled" else None,
            at_most=_HANDFUL if mode == "sampled" else None,
            rescaled_from=first_rescaled(self._loaded.rotary_change, record.prompt_tokens),
            lossy=self._cache.policy.tolerance if self._cache else None,
        )
        fill_in(record.steps, found.measured_s)
        record.check = found.check
        if found.check is not None and found.check.verdict == "rescaled":
            record.notes.append(
                f"past {self._loaded.rotary_change:,} tokens this model makes keys with another "
                "rotary base; stored keys keep the old one, an uncached forward makes all anew"
            )
        if found.out_of_time:
            record.notes.append("recomputing stopped at its time budget; --recompute all has none")

    def _totals(self) -> Totals:
        steps = self.record.steps
        prefill = steps[0].latency_s
        read = (self.record.reuse and self.record.reuse.read_s) or 0.0
        decode = sum(step.latency_s for step in steps[1:])
        costs = [step.recompute_s for step in steps if step.recompute_s is not None]
        return Totals(
            load_s=self._loaded.load_s,
            tokenize_s=self._tokenize_s,
            prefill_s=prefill,
            decode_s=decode,
            detokenize_s=self._detokenize_s,
            ttft_s=self._tokenize_s + read + prefill,
            tpot_s=decode / (len(steps) - 1) if len(steps) > 1 else None,
            forwarded_tokens=sum(step.forwarded_tokens for step in steps),
            recompute_s=sum(costs) if costs else None,
        )
