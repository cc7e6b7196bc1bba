"""The comparison: the same tokens through every contestant, interleaved, with proof.

The reference, the first contestant, chooses the tokens once, untimed. Then every repetition runs
all contestants in turn (A B A B), each from the filled prefix and through the same ids.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kvgen.measure.agreement import LogitsCheck
from kvgen.measure.clock import Clock
from kvgen.measure.communication import watch_traffic
from kvgen.measure.comparison_records import Comparison, Result, Row, Run, StepCommunication
from kvgen.measure.contestants import Cached, Contestant
from kvgen.measure.facts import rank_shares
from kvgen.measure.records import RankShares
from kvgen.measure.tally import against_reference, fits, result, unsteady
from kvgen.models.types import ProgressCallback, no_progress


@dataclass
class Track:
    """The tokens of one depth. Without ``new_ids`` the reference chooses them."""

    prefix: list[int]
    prompt: list[int]
    new_ids: list[int] | None = None

    @property
    def ids(self) -> list[int]:
        """Prefix and prompt."""
        return self.prefix + self.prompt


@dataclass
class _Bench:
    """One depth being measured."""

    track: Track
    new_ids: list[int]
    checks: dict[str, LogitsCheck]
    runs: list[Run] = field(default_factory=list)


@contextmanager
def collection_held_off() -> Iterator[None]:
    """No garbage collection inside: a pause would fall on whichever step it meets."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ComparisonRun:
    """A comparison in progress. Iterate ``rows``; ``record`` is complete up to the last row."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        tracks: Sequence[Track],
        record: Comparison,
        clock: Clock,
    ) -> None:
        """``record`` comes with everything but results; the tracks' depths differ."""
        self.record = record
        self._contestants = list(contestants)
        self._tracks = list(tracks)
        self._clock = clock
        self._progress: ProgressCallback = no_progress
        self._done = 0
        self._bench: _Bench | None = None
        self._traffic = watch_traffic()

    def rows(self) -> Iterator[Row]:
        """Measure depth after depth; a row is in the record by the time it is yielded."""
        for track in self._tracks:
            self._bench = self._prepare(track)
            for repetition in range(self.record.repetitions):
                for contestant in self._contestants:
                    self._run(contestant, self._bench, repetition)
            yield self._close()
        self.record.ranks = self._rank_shares()
        self.record.complete = True

    def report_to(self, progress: ProgressCallback) -> None:
        """Call ``progress`` from now on, outside timed regions only."""
        self._progress = progress

    def interrupted(self) -> Comparison:
        """The record with whatever was measured of the row that was interrupted."""
        if self._bench is not None and self._bench.runs:
            self._close()
        self.record.notes.append("interrupted: not everything was measured")
        return self.record

    @property
    def _total_work(self) -> int:
        record = self.record
        per_repetition = sum(
            _work(c, t, record.new_tokens) for t in self._tracks for c in self._contestants
        )
        return per_repetition * record.repetitions

    def _prepare(self, track: Track) -> _Bench:
        """Fill every prefix, let the reference choose, warm up. Nothing here is timed."""
        reference = self._contestants[0]
        count = self.record.new_tokens
        self._progress(f"depth {len(track.prefix):,}: filling", self._done, self._total_work)
        for contestant in self._contestants:
            contestant.fill(track.prefix, len(track.ids) + count)
        reference.begin(track.ids, track.new_ids)
        chosen: list[int] = []
        logits: list[Tensor] = []
        for step in reference.steps(count, self._clock):
            chosen.append(step.token_id)
            logits.append(step.logits)
        new_ids = track.new_ids or chosen
        if self.record.warmup:
            for contestant in self._contestants:
                contestant.begin(track.ids, new_ids)
                for _ in contestant.steps(min(2, count), self._clock):
                    pass
        checks = {
            c.facts.name: LogitsCheck(
                logits,
                len(track.ids),
                [reference.facts.dtype, c.facts.dtype],
                c.lossy,
                reference.rotary_change,
            )
            for c in self._contestants[1:]
        }
        return _Bench(track, new_ids, checks)

    def _run(self, contestant: Contestant, bench: _Bench, repetition: int) -> None:
        name, track = contestant.facts.name, bench.track
        what = f"depth {len(track.prefix):,}, {repetition + 1}/{self.record.repetitions}, {name}"
        self._progress(what, self._done, self._total_work)
        contestant.begin(track.ids, bench.new_ids)
        latencies: list[float] = []
        forwarded: list[int] = []
        spent: list[StepCommunication] = []
        check = bench.checks.get(name)
        if self._traffic is not None:
            self._traffic.take()  # of what came before
        try:
            with collection_held_off():
                for step in contestant.steps(self.record.new_tokens, self._clock):
                    latencies.append(step.latency_s)
                    forwarded.append(step.forwarded)
                    if self._traffic is not None:
                        spent.append(StepCommunication(*self._traffic.take()))
                    if check is not None:
                        check.add(step.logits)
        except KeyboardInterrupt:
            if check is not None:
                check.drop_run()
            raise
        run = Run(
            order=len(self.record.runs),
            depth=len(track.prefix),
            contestant=name,
            repetition=repetition,
            latencies_s=latencies,
            total_s=sum(latencies),
            forwarded_tokens=forwarded,
            kv_bytes_used=contestant.bytes_used,
            kv_bytes_allocated=contestant.bytes_allocated,
            communication=spent if spent and contestant.facts.kind != "generate" else None,
        )
        bench.runs.append(run)
        self.record.runs.append(run)
        self._done += _work(contestant, track, self.record.new_tokens)
        self._progress(what, self._done, self._total_work)
        if check is not None:
            check.end_run()

    def _close(self) -> Row:
        """Turn the bench's runs into a row of the record."""
        bench, self._bench = self._bench, None
        assert bench is not None
        results = [self._result(contestant, bench) for contestant in self._contestants]
        against_reference(results, len(bench.track.ids))
        row = Row(
            depth=len(bench.track.prefix),
            prompt_tokens=len(bench.track.prompt),
            context_ids=bench.track.ids,
            new_ids=bench.new_ids,
            results=results,
        )
        self.record.rows.append(row)
        self.record.fits = fits(self.record)
        self.record.warnings += unsteady([row])
        return row

    def _result(self, contestant: Contestant, bench: _Bench) -> Result:
        name = contestant.facts.name
        runs = [run for run in bench.runs if run.contestant == name]
        check = bench.checks.get(name)
        read = None
        if runs:
            last = runs[-1]
            read = contestant.weights.per_forward(last.forwarded_tokens[-1]) + last.kv_bytes_used
        return result(
            name,
            runs,
            self.record.tokenize_s,
            len(bench.track.prompt) + self.record.new_tokens - 1,
            check.result() if check is not None else None,
            read,
            self.record.environment.bandwidth_bytes_per_s,
        )

    def _rank_shares(self) -> RankShares | None:
        reference = self._contestants[0]
        if not isinstance(reference, Cached):
            return None
        itemsize = reference.loaded.dtype.itemsize
        return rank_shares(reference.weights.total, reference.cache, itemsize)


def _work(contestant: Contestant, track: Track, new_tokens: int) -> int:
    """Roughly how long a run takes, in forwarded tokens: a step costs as much as about 20."""
    context = len(track.prompt) if contestant.facts.kind != "no-cache" else len(track.ids)
    repeated = len(track.ids) * new_tokens if contestant.facts.kind == "no-cache" else 0
    return context + repeated + 20 * new_tokens
