"""Do two ways of computing the same logits agree? Knows torch tensors only."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from kvgen.measure.records import Check, CheckedStep, Verdict

# Largest |Δlogit| that still counts as the same arithmetic in another order, relative to the
# largest |logit|: twice the most that was seen over SmolLM2's 30 layers in each 16-bit dtype, ten
# times in float32. Damage smaller than that passes unseen, so the proof is best made in float32.
_RELATIVE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 7e-2}


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


def first_rescaled(rotary_change: int | None, tokens: int) -> int | None:
    """The first step whose prefix is longer than a model's first rotary base reaches, where the
    prefix of step 0 has ``tokens`` tokens; ``None`` for a model with one base.
    """
    return None if rotary_change is None else max(0, rotary_change + 1 - tokens)


def judge(
    steps: list[CheckedStep],
    limit: float,
    rescaled_from: int | None = None,
    lossy: float | None = None,
) -> Check:
    """``exact``: the same tokens, logits within ``limit``. ``tolerance``: logits within it too, but
    a token differs because its margin was smaller than the logits' difference. Else ``broken``.

    Two differences are explained. From step ``rescaled_from`` on the model itself uses another
    rotary base than the stored keys were made with; if the steps before agree, a difference there
    is ``rescaled``. A cache that is known to change predictions may do so by ``lossy``, infinity
    being no limit; within it the verdict is ``lossy``.
    """

    def agree(step: CheckedStep) -> bool:
        # Written so that a NaN does not.
        return step.max_abs_logit_difference <= limit

    differing = [step.index for step in steps if not agree(step)]
    verdict: Verdict = "exact" if all(step.same_token for step in steps) else "tolerance"
    if differing:
        explained = rescaled_from is not None and min(differing) >= rescaled_from
        verdict = "rescaled" if explained else "broken"
    if lossy is None:
        return Check(steps, limit, verdict)
    differences = [step.max_abs_logit_difference for step in steps]
    if verdict == "broken" and all(isfinite(d) and d <= lossy for d in differences):
        verdict = "lossy"
    return Check(steps, limit, verdict, lossy if isfinite(lossy) else None)
