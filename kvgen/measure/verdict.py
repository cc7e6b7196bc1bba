"""Do two ways of computing the same logits agree? Knows torch tensors only."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from kvgen.measure.records import Check, CheckedStep, Verdict

# Largest |Δlogit| that still counts as the same arithmetic in another order, relative to the
# largest |logit|. A few hundred roundings of float32 (2^-24) and bfloat16 (2^-9) add up like this
# over the layers of a model; a wrong position or a lost pair moves logits by far more.
_RELATIVE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def tolerance(dtype: str, largest_logit: float) -> float:
    """Largest |Δlogit| accepted as equal in ``dtype`` for logits up to ``largest_logit``."""
    return _RELATIVE[dtype] * max(1.0, largest_logit)


def lossy_tolerance(relative: float | None, largest_logit: float) -> float | None:
    """The same for a storage policy that states its own, ``relative`` to the largest |logit|."""
    return None if relative is None else relative * max(1.0, largest_logit)


def largest_logit(logits: Tensor) -> float:
    """The largest |logit|. Infinite ones, and the lowest number that some models give to tokens
    they rule out, do not count: against them every difference would be small.
    """
    size = logits.abs()
    return float(size.where(size < torch.finfo(size.dtype).max / 2, 0.0).max())


def compare_step(index: int, logits: Tensor, reference: Tensor) -> CheckedStep:
    """Hold logits ``[vocab]`` against the reference's for the same position."""
    ours, theirs = logits.float(), reference.float()
    first, second = theirs.topk(2).values.tolist()
    return CheckedStep(
        index=index,
        same_token=bool(ours.argmax() == theirs.argmax()),
        max_abs_logit_difference=float((ours - theirs).abs().max()),
        margin=first - second,
    )


def judge(steps: list[CheckedStep], limit: float, lossy: float | None = None) -> Check:
    """``exact``: the same tokens, logits within ``limit``. ``tolerance``: logits within it too, but
    a token differs because its margin was smaller than the logits' difference. Else ``broken``.

    For a cache that is known to change predictions, ``lossy`` is how far; infinity is no limit.
    Within it the verdict is ``lossy`` where it would be ``broken``.
    """
    verdict: Verdict = "exact" if all(step.same_token for step in steps) else "tolerance"
    # Written so that a NaN is broken.
    if not all(step.max_abs_logit_difference <= limit for step in steps):
        verdict = "broken"
    if lossy is None:
        return Check(steps, limit, verdict)
    accepted = (step.max_abs_logit_difference <= lossy for step in steps)
    finite = all(isfinite(step.max_abs_logit_difference) for step in steps)
    if verdict == "broken" and finite and all(accepted):
        verdict = "lossy"
    return Check(steps, limit, verdict, lossy if isfinite(lossy) else None)
