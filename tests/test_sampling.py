"""Choosing tokens: greedy, filters, penalty, and a generator of its own."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.errors import UsageError

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.25, 0.15, 0.05]))


def drawn(count: int = 400, **options: float) -> Counter[int]:
    sampler = Sampler(SamplingOptions(temperature=1.0, seed=7, **options))
    return Counter(sampler.choose(LOGITS, []) for _ in range(count))


def test_greedy_takes_the_most_likely_and_draws_no_seed() -> None:
    sampler = Sampler(SamplingOptions())
    assert sampler.choose(LOGITS, []) == 1
    assert sampler.seed is None


def test_sampling_follows_the_probabilities() -> None:
    counts = drawn(4000)
    for token, probability in enumerate(LOGITS.exp().tolist()):
        spread = math.sqrt(4000 * probability * (1 - probability))
        assert abs(counts[token] - 4000 * probability) < 5 * spread


def test_temperature_sharpens_and_flattens() -> None:
    cold = Sampler(SamplingOptions(temperature=0.05, seed=1))
    hot = Sampler(SamplingOptions(temperature=50.0, seed=1))
    assert {cold.choose(LOGITS, []) for _ in range(50)} == {1}
    assert {hot.choose(LOGITS, []) for _ in range(200)} == {0, 1, 2, 3, 4}


def test_top_k_keeps_exactly_k_even_when_scores_tie() -> None:
    assert set(drawn(top_k=2)) == {1, 2}
    tied = torch.zeros(6)
    sampler = Sampler(SamplingOptions(temperature=1.0, top_k=3, seed=3))
    assert len({sampler.choose(tied, []) for _ in range(200)}) == 3


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    assert set(drawn(top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_token_that_reaches_p() -> None:
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.51)) == {1, 2}
    assert set(drawn(top_p=1.0)) == {0, 1, 2, 3, 4}


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert set(drawn(min_p=0.45)) == {1, 2}
    assert set(drawn(min_p=1.0)) == {1}


def test_repetition_penalty_lowers_seen_tokens_of_either_sign() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0, -1.1])
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0))
    assert sampler.choose(logits, [0]) == 1
    assert sampler.choose(torch.tensor([-9.0, -9.0, -1.0, -1.1]), [2]) == 3
    assert torch.equal(logits, torch.tensor([2.0, 1.5, -1.0, -1.1]))


def test_the_same_seed_gives_the_same_tokens_whatever_else_draws() -> None:
    def run(disturb: bool) -> list[int]:
        sampler = Sampler(SamplingOptions(temperature=1.0, seed=11))
        tokens = []
        for _ in range(50):
            if disturb:
                torch.rand(3)
            tokens.append(sampler.choose(LOGITS, []))
        return tokens

    assert run(False) == run(True)


def test_a_run_without_a_seed_tells_the_one_it_drew() -> None:
    first = Sampler(SamplingOptions(temperature=1.0))
    again = Sampler(SamplingOptions(temperature=1.0, seed=first.seed))
    assert [first.choose(LOGITS, []) for _ in range(50)] == [
        again.choose(LOGITS, []) for _ in range(50)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.01},
        {"temperature": 1.0, "min_p": -0.1},
        {"temperature": 1.0, "min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"top_k": 5},
        {"top_p": 0.9},
    ],
)
def test_values_that_cannot_be_meant_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SamplingOptions(**options)
