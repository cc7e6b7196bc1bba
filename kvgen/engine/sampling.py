"""Choosing the next token from logits. Knows torch only."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgen.engine.finite import check_finite
from kvgen.errors import UsageError
from kvgen.models.ranks import shared


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. The defaults are greedy.

    ``temperature`` 0 takes the most likely token. ``top_k`` keeps the k most likely, ``top_p`` the
    smallest set whose probability reaches p, ``min_p`` those at least that fraction of the most
    likely one's. ``repetition_penalty`` above 1 makes tokens already in the sequence less likely
    (Keskar et al., 2019, section 4.1). Raises ``UsageError`` for values that cannot be meant.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check(0 <= self.temperature < float("inf"), "--temperature", "0 or more", self.temperature)
        _check(self.top_k is None or self.top_k >= 1, "--top-k", "1 or more", self.top_k)
        _check(self.top_p is None or 0 < self.top_p <= 1, "--top-p", "in (0, 1]", self.top_p)
        _check(self.min_p is None or 0 <= self.min_p <= 1, "--min-p", "in [0, 1]", self.min_p)
        _check(
            0 < self.repetition_penalty < float("inf"),
            "--repetition-penalty",
            "above 0",
            self.repetition_penalty,
        )
        _check(self.seed is None or 0 <= self.seed < 2**63, "--seed", "below 2^63", self.seed)
        filters = {"--top-k": self.top_k, "--top-p": self.top_p, "--min-p": self.min_p}
        given = [name for name, value in filters.items() if value is not None]
        if given and self.temperature == 0:
            raise UsageError(
                f"{given[0]} has no effect on greedy decoding; add --temperature, such as 0.8"
            )


def _check(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise UsageError(f"{name} must be {expected}, not {value}")


# Below the smallest difference of two float32 logits over the largest float32.
_COLDEST = 1e-30


class Sampler:
    """Draws tokens with a generator of its own: the same seed gives the same tokens, whatever
    else uses random numbers.
    """

    def __init__(self, options: SamplingOptions) -> None:
        """Without a seed one is drawn; ``seed`` tells it, so that a run can be repeated."""
        self.options = options
        self.greedy = options.temperature == 0
        self.seed = None
        if not self.greedy:
            drawn = options.seed is None
            self.seed = shared(lambda: secrets.randbits(32)) if drawn else options.seed
            # On the CPU always, so that the device does not change the draw.
            self._generator = torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Tensor, ids: list[int]) -> int:
        """The next token's id, given logits ``[vocab]`` and the ids so far.

        Raises ``NotFiniteError`` when the likeliest has no finite logit, as after an overflow.
        """
        options = self.options
        check_finite(logits)
        if options.repetition_penalty != 1.0:
            logits = _penalised(logits, ids, options.repetition_penalty)
        if self.greedy:
            return int(logits.argmax())
        scores = logits.float().cpu()
        # Relative to the likeliest, so that the coldest temperature overflows downwards only.
        scaled = (scores - scores.max()) / max(options.temperature, _COLDEST)
        if options.top_k is not None:
            scaled = _keep_top_k(scaled, options.top_k)
        probabilities = scaled.softmax(dim=-1)
        if options.top_p is not None:
            probabilities = _keep_top_p(probabilities, options.top_p)
        if options.min_p is not None:
            floor = options.min_p * probabilities.max()
            probabilities = probabilities.where(probabilities >= floor, 0.0)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _penalised(logits: Tensor, ids: list[int], penalty: float) -> Tensor:
    seen = torch.tensor(sorted(set(ids)), device=logits.device)
    scores = logits[seen]
    return logits.index_put((seen,), torch.where(scores > 0, scores / penalty, scores * penalty))


def _keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Exactly k candidates, also when scores tie at the border."""
    kept = scores.topk(min(k, scores.shape[-1])).indices
    return torch.full_like(scores, float("-inf")).index_copy(0, kept, scores[kept])


def _keep_top_p(probabilities: Tensor, p: float) -> Tensor:
    """The likeliest tokens up to and including the one that reaches p."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return probabilities.index_fill(0, order[before >= p], 0.0)
