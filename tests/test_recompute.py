"""The cost without a cache: which steps are recomputed, what their times become, the verdict."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from clocks import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvgen.measure.recompute import KeptLogits, fill_in, fit_cost, recompute, spread_order
from kvgen.measure.records import CheckedStep, Step
from kvgen.measure.verdict import compare_step, judge, tolerance

# Which steps are kept


@given(limit=st.integers(2, 40), count=st.integers(1, 400))
def test_kept_steps_are_bounded_evenly_spaced_and_hold_first_and_newest(
    limit: int, count: int
) -> None:
    kept = KeptLogits(limit)
    for index in range(count):
        kept.add(index, torch.tensor([float(index)]))
    found = kept.by_step()
    assert all(float(logits) == index for index, logits in found.items())
    indexes = sorted(found)
    assert indexes[0] == 0
    assert indexes[-1] == count - 1
    assert len(indexes) <= limit
    gaps = {b - a for a, b in pairwise(indexes[:-1])}
    assert len(gaps) <= 1
    # Never thinner than it must be: with half the spacing they would not fit.
    if gaps and (gap := gaps.pop()) > 1:
        assert len(range(0, count, gap // 2)) >= limit


def test_no_step_has_been_kept_before_the_first() -> None:
    assert KeptLogits(4).by_step() == {}


@given(st.sets(st.integers(0, 500), max_size=40))
def test_the_spread_order_is_a_rearrangement_that_begins_with_last_and_first(
    indexes: set[int],
) -> None:
    order = list(spread_order(list(indexes)))
    assert sorted(order) == sorted(indexes)
    if len(indexes) >= 2:
        assert order[:2] == [max(indexes), min(indexes)]


def test_every_beginning_of_the_spread_order_covers_the_whole() -> None:
    assert list(spread_order(list(range(9))))[:3] == [8, 0, 4]
    assert set(list(spread_order(list(range(9))))[3:5]) == {2, 6}
    assert list(spread_order([0, 15, 16])) == [16, 0, 15]


# The fitted curve


def step_at(index: int, position: int) -> Step:
    return Step(index, 7, "x", "x", position, 0.01, 1, position, 0, 0, 0)


def test_a_quadratic_cost_is_found_again() -> None:
    # 2 + 3 n + 5 n^2 at 1, 2, 4 and 10
    lengths = np.array([1.0, 2.0, 4.0, 10.0])
    curve = fit_cost(lengths, np.array([10.0, 28.0, 94.0, 532.0]))
    assert curve(3) == pytest.approx(2 + 9 + 45)
    assert curve(7) == pytest.approx(2 + 21 + 245)


def test_two_points_give_the_line_between_them() -> None:
    curve = fit_cost(np.array([10.0, 30.0]), np.array([1.0, 2.0]))
    assert curve(20) == pytest.approx(1.5)
    assert curve(25) == pytest.approx(1.75)


def test_one_point_gives_a_constant() -> None:
    assert fit_cost(np.array([10.0]), np.array([1.5]))(99) == pytest.approx(1.5)


def test_a_quadratic_that_would_fall_gives_way_to_a_line() -> None:
    # The parabola through these turns at 3.5; the least-squares line is 1 + 0.5 (n - 1) + ...
    curve = fit_cost(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 2.0, 3.0, 3.0]))
    # slope 1.0 and mean 2.0 at mean length 2.5
    assert curve(1) == pytest.approx(0.5)
    assert curve(4) == pytest.approx(3.5)


def test_times_that_fall_with_length_are_noise_and_give_their_mean() -> None:
    curve = fit_cost(np.array([10.0, 20.0, 30.0]), np.array([3.0, 2.0, 1.0]))
    assert curve(10) == curve(30) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 100)), min_size=1, max_size=12))
def test_no_fitted_cost_falls_with_length(points: list[tuple[int, float]]) -> None:
    lengths = np.array([float(n) for n, _ in points])
    curve = fit_cost(lengths, np.array([s for _, s in points]))
    grid = np.linspace(lengths.min(), lengths.max(), 50)
    costs = np.array([curve(n) for n in grid])
    assert np.all(np.diff(costs) >= -1e-9 * max(1.0, np.abs(costs).max()))


def test_steps_are_measured_where_they_were_and_fitted_elsewhere() -> None:
    steps = [step_at(i, 10 + i) for i in range(5)]
    fill_in(steps, {0: 1.0, 4: 3.0})
    assert [s.recompute_s for s in steps] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])
    assert [s.recompute_source for s in steps] == [
        "measured",
        "fitted",
        "fitted",
        "fitted",
        "measured",
    ]


def test_a_fitted_cost_is_never_below_nothing() -> None:
    # The line through these two crosses zero at position 1.
    steps = [step_at(i, i) for i in range(5)]
    fill_in(steps, {3: 0.2, 4: 0.3})
    assert [s.recompute_s for s in steps] == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])


def test_without_a_measurement_no_cost_is_invented() -> None:
    steps = [step_at(0, 3)]
    fill_in(steps, {})
    assert (steps[0].recompute_s, steps[0].recompute_source) == (None, None)


# The runs and their budget

PROMPT_TOKENS = 20
IDS = list(range(60))


def forward_taking(clock: FakeClock, per_token_s: float, seen: list[int]) -> Callable[..., Tensor]:
    def forward(ids: list[int]) -> Tensor:
        seen.append(len(ids))
        clock.pass_(per_token_s * len(ids))
        return torch.tensor([float(len(ids)), 0.0, 1.0])

    return forward


def kept_at(*indexes: int) -> dict[int, Tensor]:
    return {i: torch.tensor([float(PROMPT_TOKENS + i), 0.0, 1.0]) for i in indexes}


def test_each_step_is_recomputed_from_the_ids_before_it() -> None:
    clock, seen = FakeClock(), []
    found = recompute(
        forward_taking(clock, 0.1, seen),
        *(IDS, PROMPT_TOKENS, kept_at(0, 10, 30), clock, "float32"),
        budget_s=None,
        at_most=None,
    )
    assert seen == [50, 20, 30]  # last, first, middle
    assert found.measured_s == pytest.approx({30: 5.0, 0: 2.0, 10: 3.0})
    assert found.check is not None
    assert [s.index for s in found.check.steps] == [0, 10, 30]
    assert found.check.verdict == "exact"
    assert not found.out_of_time


def test_a_run_that_would_pass_the_budget_is_not_begun() -> None:
    clock, seen = FakeClock(), []
    # 5.0 s, then 2.0, then 3.0: the dearest so far (5.0) must still fit each time.
    found = recompute(
        forward_taking(clock, 0.1, seen),
        *(IDS, PROMPT_TOKENS, kept_at(0, 10, 30), clock, "float32"),
        budget_s=11.0,
        at_most=None,
    )
    assert sorted(found.measured_s) == [0, 30]
    assert found.out_of_time


def test_the_first_run_happens_whatever_the_budget() -> None:
    clock, seen = FakeClock(), []
    found = recompute(
        forward_taking(clock, 0.1, seen),
        *(IDS, PROMPT_TOKENS, kept_at(0, 10, 30), clock, "float32"),
        budget_s=0.0,
        at_most=None,
    )
    assert sorted(found.measured_s) == [30]
    assert found.out_of_time
    assert found.check is not None


def test_at_most_so_many_are_run_and_that_is_not_lack_of_time() -> None:
    clock, seen = FakeClock(), []
    found = recompute(
        forward_taking(clock, 0.1, seen),
        *(IDS, PROMPT_TOKENS, kept_at(*range(31)), clock, "float32"),
        budget_s=1e9,
        at_most=5,
    )
    assert sorted(found.measured_s)[::4] == [0, 30]
    assert len(found.measured_s) == 5
    assert not found.out_of_time


def test_nothing_kept_is_nothing_checked() -> None:
    clock = FakeClock()
    found = recompute(
        forward_taking(clock, 0.1, []),
        *(IDS, PROMPT_TOKENS, {}, clock, "float32"),
        budget_s=None,
        at_most=None,
    )
    assert (found.measured_s, found.check) == ({}, None)


def test_a_step_that_differs_is_named() -> None:
    clock = FakeClock()
    kept = kept_at(0, 10)
    kept[10] = kept[10] + torch.tensor([0.0, 0.5, 0.0])
    found = recompute(
        forward_taking(clock, 0.1, []),
        *(IDS, PROMPT_TOKENS, kept, clock, "float32"),
        budget_s=None,
        at_most=None,
    )
    assert found.check is not None
    assert found.check.verdict == "broken"
    differences = {s.index: s.max_abs_logit_difference for s in found.check.steps}
    assert differences == pytest.approx({0: 0.0, 10: 0.5})


# The verdict


def checked(same: bool, difference: float) -> CheckedStep:
    return CheckedStep(0, same, difference, margin=0.1)


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        ([(True, 0.0)], "exact"),
        ([(True, 0.01), (True, 0.0)], "exact"),  # the limit itself is within it
        ([(True, 0.0), (False, 0.005)], "tolerance"),
        ([(True, 0.011)], "broken"),
        ([(False, 0.011), (True, 0.0)], "broken"),
        ([(True, 0.0), (True, float("nan"))], "broken"),
        ([(True, float("inf"))], "broken"),
    ],
)
def test_the_verdict(steps: list[tuple[bool, float]], verdict: str) -> None:
    assert judge([checked(*step) for step in steps], limit=0.01).verdict == verdict


def test_a_step_is_compared_by_its_largest_difference_and_the_references_margin() -> None:
    ours = torch.tensor([1.0, 5.0, 2.0])
    theirs = torch.tensor([1.0, 4.5, 4.25])
    step = compare_step(3, ours, theirs)
    assert (step.index, step.same_token) == (3, True)
    assert step.max_abs_logit_difference == pytest.approx(2.25)
    assert step.margin == pytest.approx(0.25)
    assert not compare_step(0, torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])).same_token


def test_half_precision_is_compared_without_rounding_the_difference() -> None:
    ours = torch.tensor([100.0, 0.0], dtype=torch.bfloat16)
    theirs = torch.tensor([100.5, 0.0], dtype=torch.bfloat16)
    assert compare_step(0, ours, theirs).max_abs_logit_difference == 0.5


@pytest.mark.parametrize(
    "logits", [[float("nan"), 1.0, 0.0], [float("inf"), 1.0, 0.0], [float("-inf"), 1.0, 0.0]]
)
@pytest.mark.parametrize("whose", ["ours", "theirs", "both"])
def test_logits_that_are_no_numbers_are_broken(logits: list[float], whose: str) -> None:
    good, bad = torch.tensor([2.0, 1.0, 0.0]), torch.tensor(logits)
    ours, theirs = (bad if whose in (name, "both") else good for name in ("ours", "theirs"))
    clock = FakeClock()
    found = recompute(
        lambda ids: theirs,
        *(IDS, PROMPT_TOKENS, {0: ours}, clock, "float32"),
        budget_s=None,
        at_most=None,
    )
    assert found.check is not None
    assert found.check.verdict == "broken"


def test_masked_logits_do_not_widen_what_is_accepted() -> None:
    """Chameleon sets the logits of image tokens to the lowest number there is."""
    lowest = torch.finfo(torch.float32).min
    clock = FakeClock()
    found = recompute(
        lambda ids: torch.tensor([2.0, 1.0, lowest]),
        *(IDS, PROMPT_TOKENS, {0: torch.tensor([2.5, 1.0, lowest])}, clock, "float32"),
        budget_s=None,
        at_most=None,
    )
    assert found.check is not None
    assert found.check.tolerance == pytest.approx(2e-4)
    assert found.check.verdict == "broken"


@pytest.mark.parametrize(
    ("dtype", "relative"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 7e-2)]
)
def test_what_is_accepted_grows_with_the_logits_and_the_dtypes_rounding(
    dtype: str, relative: float
) -> None:
    assert tolerance(dtype, 20.0) == pytest.approx(20 * relative)
    assert tolerance(dtype, 0.01) == pytest.approx(relative)
