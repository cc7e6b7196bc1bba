"""Holds every contestant's logits against the reference's, outside all timed regions."""

from __future__ import annotations

import math

from torch import Tensor

from kvgen.measure.comparison_records import Agreement, FirstDifference
from kvgen.measure.records import CheckedStep
from kvgen.measure.verdict import (
    compare_step,
    first_rescaled,
    judge,
    largest_logit,
    lossy_tolerance,
    tolerance,
)

# Logits of a whole run are kept up to this size and compared after it. Beyond, each row is compared
# as it comes, between timed steps, which leaves the processor's caches a little colder.
KEPT_BYTES = 512 * 1024 * 1024


class LogitsCheck:
    """Compares one contestant's runs at one depth with the reference's logits."""

    def __init__(
        self,
        reference: list[Tensor],
        first_position: int,
        dtypes: list[str],
        lossy: float | None = None,
        rotary_change: int | None = None,
    ) -> None:
        """``reference`` is one ``[vocab]`` per step, ``first_position`` where the first token lies.

        Of the ``dtypes`` that meet, the one that rounds most sets the tolerance. ``lossy`` is how
        far the contestant's logits may move by design, relative to the largest; ``rotary_change``
        is the length in tokens past which the model makes keys with another rotary base.
        """
        self._reference = reference
        self._first_position = first_position
        self._dtypes = dtypes
        self._lossy = lossy
        self._rescaled_from = first_rescaled(rotary_change, first_position)
        self._drop = 0.0
        self._steps: dict[int, CheckedStep] = {}
        self._sum = 0.0
        self._compared = 0
        self._largest = 0.0
        self._first: FirstDifference | None = None
        self._pending: list[Tensor] = []
        one = reference[0].numel() * 4 if reference else 0
        self._keep = len(reference) * one <= KEPT_BYTES

    def add(self, logits: Tensor) -> None:
        """The next step's logits ``[vocab]``, in order."""
        self._pending.append(logits)
        if not self._keep:
            self._compare(self._compared % len(self._reference), self._pending.pop())

    def end_run(self) -> None:
        """Compare what was kept of a run."""
        for index, logits in enumerate(self._pending):
            self._compare(index, logits)
        self._pending = []

    def drop_run(self) -> None:
        """Forget what was kept of a run that did not end."""
        self._pending = []

    def result(self) -> Agreement | None:
        """All runs together: the worst of each step. ``None`` when nothing was compared."""
        if not self._steps:
            return None
        limit = max(tolerance(dtype, self._largest) for dtype in self._dtypes)
        lossy = lossy_tolerance(self._lossy, self._largest)
        check = judge(list(self._steps.values()), limit, self._rescaled_from, lossy)
        return Agreement(
            verdict=check.verdict,
            tolerance=limit,
            max_abs_logit_difference=max(check.steps, key=_size).max_abs_logit_difference,
            mean_abs_logit_difference=self._sum / self._compared,
            mean_probability_drop=self._drop / self._compared,
            compared_steps=self._compared,
            first_difference=self._first,
        )

    def _compare(self, index: int, logits: Tensor) -> None:
        reference = self._reference[index]
        logits = logits.to(reference.device)
        found = compare_step(index, logits, reference)
        self._compared += 1
        self._sum += float((logits.float() - reference.float()).abs().mean())
        self._largest = max(self._largest, largest_logit(reference))
        likeliest = int(reference.argmax())
        before, after = (x.float().softmax(dim=-1)[likeliest] for x in (reference, logits))
        self._drop += float(before - after)
        worst = self._steps.get(index)
        if worst is None or _size(found) > _size(worst):
            self._steps[index] = found
        if worst is not None and not (worst.same_token and found.same_token):
            self._steps[index].same_token = False
        if not found.same_token and (self._first is None or index < self._first.index):
            self._first = FirstDifference(
                index=index,
                position=self._first_position + index,
                reference_id=likeliest,
                contestant_id=int(logits.argmax()),
                margin=found.margin,
                abs_logit_difference=found.max_abs_logit_difference,
            )


def _size(step: CheckedStep) -> float:
    """The largest difference; what is no number is worse than any."""
    difference = step.max_abs_logit_difference
    return math.inf if math.isnan(difference) else difference
