"""What one check of a cache found, and the small parts that checks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvgen.cache.layers import CannotTrimError
from kvgen.cache.manager import KVCache

CHUNK_SIZES = (1, 3, 7)
TRAINING = "one masked forward (training)"
PAST_THE_WINDOW = "past the window"
TRIM = "trim and regenerate"
RESET = "reset and repeat"
FORK = "fork is independent"
SAVE_AND_LOAD = "save and load"
BATCH = "batch against alone"
PADDING = "left padding"
BYTES = "bytes follow the formula"


@dataclass(frozen=True)
class Outcome:
    """What one check found."""

    check: str
    """Its name."""
    status: Literal["pass", "fail", "not applicable"]
    """not applicable: the model or kvgen has nothing that could be checked; ``detail`` says why."""
    max_abs_logit_difference: float | None = None
    """Over all positions compared; absent where no logits were."""
    position: int | None = None
    """The first position that failed."""
    detail: str = ""
    """Why it failed or does not apply; empty for most."""


MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError)


def guarded(name: str, check: Callable[[], Outcome]) -> Outcome:
    """What breaks off has failed; running out of memory says nothing about the cache."""
    try:
        return check()
    except MEMORY_ERRORS:
        raise
    except Exception as error:
        return Outcome(name, "fail", detail=told(error))


def told(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def chunks_of(size: int) -> str:
    """The name of the check with pieces of ``size`` tokens."""
    return f"chunks of {size}"


def not_applicable(name: str, why: str) -> Outcome:
    """The outcome of a check that has nothing to check."""
    return Outcome(name, "not applicable", detail=why)


def unchanged_after_refusal(
    name: str, cache: KVCache, position: int, refusal: CannotTrimError
) -> Outcome:
    """A refused trim is right, if it changed nothing."""
    if cache.position != position:
        detail = f"refused, yet the position moved from {position} to {cache.position}"
        return Outcome(name, "fail", position=position, detail=detail)
    return not_applicable(name, str(refusal))


def differences(logits: Tensor, expected: Tensor) -> Tensor:
    """The largest |Δlogit| at each position ``[positions]``."""
    return (logits.float() - expected.float()).abs().flatten(1).amax(dim=-1)


def by_position(logits: Tensor, padding: list[int], begin: int = 0) -> Tensor:
    """``[rows, positions, vocab]`` from position ``begin`` on, positions first and padding zero."""
    logits = logits.clone()
    for row, count in enumerate(padding):
        logits[row, : max(0, count - begin)] = 0
    return logits.transpose(0, 1)


def ones_around(marks: list[int], length: int, whole: bool) -> list[int]:
    """Sizes that sum up to ``length``: single tokens near each mark, larger pieces between.

    Unless ``whole``, only the first piece may be larger than one token.
    """
    single = {mark + offset for mark in marks for offset in range(-2, 3)}
    sizes: list[int] = []
    for position in range(length):
        alone = position in single or position - 1 in single or not (whole or len(sizes) < 2)
        if alone or not sizes:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes
