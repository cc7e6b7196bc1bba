"""Statistics against numbers worked out by hand, and a comparison timed by a scripted clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvgen.engine.decoder import Token
from kvgen.measure.compare import ComparisonRun, Track
from kvgen.measure.comparison_records import Comparison, ContestantFacts
from kvgen.measure.contestants import StepContestant
from kvgen.measure.records import Environment, ModelFacts
from kvgen.measure.stats import (
    Line,
    Ratio,
    Summary,
    break_even,
    fit_line,
    percentile,
    ratio,
    summary,
    tpot,
    ttft,
)


class ScriptedClock:
    """Tells the times it was given, and fails when asked once more."""

    def __init__(self, readings: list[float]) -> None:
        self._readings = iter(readings)

    def now(self) -> float:
        return next(self._readings)


def test_percentiles_interpolate_between_neighbours() -> None:
    samples = [40.0, 10.0, 20.0, 30.0]
    assert percentile(samples, 0) == 10
    assert percentile(samples, 50) == 25
    assert percentile(samples, 75) == 32.5
    assert percentile(samples, 95) == pytest.approx(38.5)
    assert percentile(samples, 100) == 40
    assert percentile([7.0], 95) == 7


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_a_spread_is_half_the_interquartile_range() -> None:
    # Quartiles of 1 2 3 4 100 are 2 and 4; the outlier moves neither.
    assert summary([100.0, 1.0, 2.0, 3.0, 4.0]) == Summary(3, 1, 1, 100, 5)
    assert summary([5.0]) == Summary(5, 0, 5, 5, 1)
    assert summary([]) is None


def test_ttft_and_tpot_exist_only_where_they_mean_something() -> None:
    assert ttft(0.5, [2.0, 1.0, 3.0]) == 2.5
    assert tpot([2.0, 1.0, 3.0]) == 2.0
    assert ttft(0.5, [2.0]) == 2.5
    assert tpot([2.0]) is None
    assert ttft(0.5, []) is None
    assert tpot([]) is None


def test_the_spread_of_a_ratio_adds_relative_spreads_in_squares() -> None:
    top, bottom = Summary(30, 0.9, 0, 0, 5), Summary(10, 0.4, 0, 0, 5)
    found = ratio(top, bottom)
    assert found is not None
    assert found.value == 3
    assert found.spread == pytest.approx(3 * 0.05)  # 3 % and 4 % make 5 %
    assert ratio(None, bottom) is None
    assert ratio(top, Summary(0, 0, 0, 0, 1)) is None


def test_a_fitted_line_gives_slope_and_its_error() -> None:
    exact = fit_line([100, 200, 300], [1.2, 1.4, 1.6])
    assert exact is not None
    assert exact.slope == pytest.approx(0.002)
    assert exact.intercept == pytest.approx(1.0)
    assert exact.slope_error == pytest.approx(0, abs=1e-12)
    assert exact.is_clear
    # Around the mean 2: residuals -1/3, 2/3, -1/3, so the error is sqrt((2/3) / 1 / 2).
    scattered = fit_line([1, 2, 3], [1, 2, 1])
    assert scattered == Line(pytest.approx(4 / 3), pytest.approx(0), math.sqrt(1 / 3), 3)
    assert not scattered.is_clear


def test_a_line_needs_three_points_and_two_places() -> None:
    assert fit_line([], []) is None
    assert fit_line([1, 2], [1, 2]) is None
    assert fit_line([5, 5, 5], [1, 2, 3]) is None


def test_break_even_is_the_first_step_whose_total_is_lower() -> None:
    assert break_even([5, 1, 1, 1], [3, 2, 2, 2]) == 3  # 5 6 7 8 against 3 5 7 9
    assert break_even([1], [2]) == 0
    assert break_even([5, 1], [3, 2]) is None
    assert break_even([], []) is None


class Double(StepContestant):
    """A contestant without a model: its steps take what the clock says."""

    def __init__(self, name: str, kind: Any, log: list[str] | None = None) -> None:
        self.facts = ContestantFacts(name, "", kind, "float32", 1000)
        self.weights: Any = SimpleNamespace(per_forward=lambda tokens: 1000)
        self.log = log if log is not None else []
        self.held = 0

    def fill(self, prefix: list[int], capacity: int) -> None:
        self.log.append(f"fill {self.facts.name}")

    def begin(self, ids: list[int], forced: list[int] | None) -> None:
        self.log.append(f"begin {self.facts.name}")
        self.held = 0
        self.decoder = SimpleNamespace(ids=list(ids), step=self._step)

    def _step(self) -> Token:
        self.held = len(self.decoder.ids)
        self.decoder.ids.append(1)
        return Token(1, torch.tensor([0.0, 2.0, 1.0]))

    @property
    def pending(self) -> int:
        everything = len(self.decoder.ids)
        return everything if self.facts.kind == "no-cache" else everything - self.held

    @property
    def bytes_used(self) -> int:
        return 0 if self.facts.kind == "no-cache" else 10 * self.held

    @property
    def bytes_allocated(self) -> int:
        return 2 * self.bytes_used


def record_for(contestants: list[Double], new_tokens: int, repetitions: int) -> Comparison:
    return Comparison(
        model=ModelFacts("double", "folder", "", None, "", 1, 1000, 1, None, 10),
        environment=Environment(
            "", None, "", "", "", "", "", 1, 1, None, "cpu", "float32", "", 1e6
        ),
        random_weights=False,
        prompt="",
        prompt_source="tokens",
        tokenize_s=0.5,
        new_tokens=new_tokens,
        depths=[0],
        repetitions=repetitions,
        warmup=False,
        contestants=[one.facts for one in contestants],
    )


def readings(*latencies: float) -> Iterator[float]:
    """Begin and end of each step, one second apart from the next."""
    now = 0.0
    for latency in latencies:
        yield now
        now += latency
        yield now
        now += 1.0


def compared(new_tokens: int, repetitions: int, *latencies: float) -> Comparison:
    """A comparison of two doubles over a prompt of four tokens, with these latencies in order."""
    contestants = [Double("ours", "cache"), Double("theirs", "no-cache")]
    record = record_for(contestants, new_tokens, repetitions)
    choosing = [0.0] * (2 * new_tokens)
    clock = ScriptedClock(choosing + list(readings(*latencies)))
    track = Track([], [1, 1, 1, 1])
    for _ in ComparisonRun(contestants, [track], record, clock).rows():
        pass
    assert record.complete
    return record


def test_a_scripted_clock_gives_the_times_worked_out_by_hand() -> None:
    record = compared(3, 2, 8, 2, 4, 8, 16, 32, 8, 4, 4, 8, 18, 32)
    ours, theirs = record.rows[0].results
    assert [run.latencies_s for run in record.runs] == [
        [8, 2, 4],
        [8, 16, 32],
        [8, 4, 4],
        [8, 18, 32],
    ]
    assert [run.total_s for run in record.runs] == [14, 56, 16, 58]
    assert ours.prefill_s == Summary(8, 0, 8, 8, 2)
    assert ours.ttft_s == Summary(8.5, 0, 8.5, 8.5, 2)
    assert ours.tpot_s == Summary(3.5, 0.25, 3, 4, 2)
    assert ours.tokens_per_s == 1 / 3.5
    assert ours.step_s == [8, 3, 4]
    assert ours.step_p95_s == pytest.approx(4)
    assert theirs.tpot_s == Summary(24.5, 0.25, 24, 25, 2)
    assert theirs.speedup == Ratio(7.0, pytest.approx(7 * math.hypot(0.25 / 3.5, 0.25 / 24.5)))
    assert theirs.prefill_speedup == Ratio(1.0, 0.0)
    assert theirs.break_even_position == 5  # the second new token of a prompt of four
    assert (ours.forwarded_tokens, ours.reprocessed_tokens) == (4 + 1 + 1, 0)
    assert (theirs.forwarded_tokens, theirs.reprocessed_tokens) == (4 + 5 + 6, 9)
    assert (ours.kv_bytes_peak, ours.kv_bytes_allocated) == (60, 120)
    assert ours.bytes_read == 1060
    assert ours.bandwidth_share == pytest.approx(1060 / 4 / 1e6)


def test_the_slope_is_fitted_over_positions() -> None:
    record = compared(4, 1, 9, 10, 11, 12, 9, 20, 30, 40)
    ours, theirs = record.fits
    assert ours.line == Line(pytest.approx(5), pytest.approx(1), pytest.approx(0), 3)
    assert theirs.line is not None
    assert theirs.line.slope == pytest.approx(10)
    assert ours.kv_bytes_per_token == 10
    assert ours.floor_s_per_token == pytest.approx(1e-5)
    assert theirs.kv_bytes_per_token is None


def test_one_token_has_a_ttft_and_no_tpot() -> None:
    record = compared(1, 2, 8, 9, 10, 11)
    ours, theirs = record.rows[0].results
    assert ours.ttft_s == Summary(9.5, 0.5, 8.5, 10.5, 2)
    assert ours.tpot_s is None
    assert ours.tokens_per_s is None
    assert ours.step_p95_s is None
    assert theirs.speedup is None
    assert record.fits[0].line is None


def test_no_token_has_no_times_at_all() -> None:
    from kvgen.measure.tally import result

    empty = result("ours", [], 0.5, 3, None)
    assert (empty.prefill_s, empty.ttft_s, empty.tpot_s, empty.step_p95_s) == (None,) * 4
    assert empty.step_s == []
    assert empty.forwarded_tokens == empty.reprocessed_tokens == 0


def test_runs_take_turns_and_each_prefix_is_filled_once() -> None:
    log: list[str] = []
    contestants = [Double(name, "cache", log) for name in ("A", "B", "C")]
    record = record_for(contestants, 2, 3)
    record.depths = [0, 2]
    clock = ScriptedClock([float(i) for i in range(1000)])
    tracks = [Track([], [1, 1]), Track([1, 1], [1])]
    rows = list(ComparisonRun(contestants, tracks, record, clock).rows())
    assert len(rows) == 2
    assert [run.order for run in record.runs] == list(range(18))
    turns = [(run.depth, run.repetition, run.contestant) for run in record.runs]
    assert turns == [(d, r, name) for d in (0, 2) for r in range(3) for name in "ABC"]
    depth = ["fill A", "fill B", "fill C", "begin A"] + ["begin A", "begin B", "begin C"] * 3
    assert log == depth * 2  # the lone begin is the reference choosing the tokens


def test_garbage_collection_waits_until_a_run_has_ended() -> None:
    import gc

    seen = []

    class Watching(Double):
        def _step(self) -> Token:
            seen.append(gc.isenabled())
            return super()._step()

    contestants: list[Double] = [Watching("ours", "cache")]
    record = record_for(contestants, 2, 1)
    clock = ScriptedClock([0.0] * 100)
    for _ in ComparisonRun(contestants, [Track([], [1])], record, clock).rows():
        pass
    assert seen == [True, True, False, False]  # choosing is not timed, the run is
    assert gc.isenabled()


def test_an_interruption_keeps_what_was_measured_and_claims_nothing_for_the_rest() -> None:
    from kvgen.report.exporters import csv_text, text
    from kvgen.report.rows import Titled

    class Stopping(Double):
        def _step(self) -> Token:
            raise KeyboardInterrupt

    contestants = [Double("ours", "cache"), Stopping("theirs", "no-cache")]
    record = record_for(contestants, 2, 2)
    clock = ScriptedClock([0.0] * 4 + list(readings(5, 3)) + [99.0])
    run = ComparisonRun(contestants, [Track([], [1])], record, clock)
    with pytest.raises(KeyboardInterrupt):
        list(run.rows())
    assert run.interrupted() is record
    assert not record.complete
    ours, theirs = record.rows[0].results
    assert ours.tpot_s == Summary(3, 0, 3, 3, 1)
    assert (theirs.tpot_s, theirs.agreement, theirs.speedup) == (None, None, None)
    assert "reference" not in csv_text([Titled("", record)]).splitlines()[2]
    assert "NOT COMPLETE" in text([Titled("", record)])
