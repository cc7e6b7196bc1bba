"""Every check of ``kvgen.measure.verify`` on a loaded model, as one record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kvgen.cache.adapter import specs_for
from kvgen.cache.manager import KVCache
from kvgen.engine.forward import Forward
from kvgen.measure.checks import Outcome
from kvgen.measure.environment import environment
from kvgen.measure.facts import model_facts
from kvgen.measure.records import Environment, ModelFacts
from kvgen.measure.roofline import WeightReads
from kvgen.measure.verify import Verifier
from kvgen.models import LoadedModel

_PROMPT = 6
_LENGTHS = {True: 16, False: 64}
_LONGEST = {True: 64, False: 2048}
# A whole forward's logits are kept for comparison: this many numbers at most.
_MOST_LOGITS = 256 * 1024 * 1024
_TEXT = (
    "A language model reads its text from left to right. Whatever it has computed about a word "
    "does not depend on the words that follow, so it can be kept and need not be computed again. "
)


@dataclass
class Verification:
    """One run of ``kvgen verify``."""

    model: ModelFacts
    """The model and the numbers behind its cache."""
    environment: Environment
    """Where and with what it was verified."""
    quick: bool
    """Whether only short sequences were asked for."""
    tokens: int
    """Tokens that most checks forward; passing a window takes more."""
    tolerance: float
    """Largest logit difference that counts as the same in this dtype."""
    outcomes: list[Outcome] = field(default_factory=list)
    """One per check, in the order they ran."""

    @property
    def failed(self) -> list[Outcome]:
        """The checks that found the cache wrong."""
        return [outcome for outcome in self.outcomes if outcome.status == "fail"]


class VerificationRun:
    """The checks of one model. Iterate ``outcomes`` to run them; ``record`` keeps the results."""

    def __init__(self, loaded: LoadedModel, quick: bool) -> None:
        """Forwards the reference. Raises ``ModelError`` for a model that the cache cannot serve."""
        cache = KVCache(specs_for(loaded.model))
        limit = loaded.context_limit or _LONGEST[quick]
        vocabulary = int(loaded.config.vocab_size)
        ids = _ids(loaded, min(_LENGTHS[quick], limit))
        self._verifier = Verifier(
            loaded.model,
            ids,
            min(_PROMPT, len(ids) - 1),
            forward=Forward(loaded.model, loaded.attention, loaded.products),
            longest=min(_LONGEST[quick], limit, max(len(ids), _MOST_LOGITS // vocabulary)),
        )
        self.record = Verification(
            model=model_facts(loaded, WeightReads(loaded.model).total, cache),
            environment=environment(self._verifier.forward, loaded),
            quick=quick,
            tokens=len(ids),
            tolerance=self._verifier.limit,
        )

    def outcomes(self) -> Iterator[Outcome]:
        """Run the checks one after another."""
        for outcome in self._verifier.outcomes():
            self.record.outcomes.append(outcome)
            yield outcome


def _ids(loaded: LoadedModel, count: int) -> list[int]:
    """``count`` ids of ordinary text, or of any kind where the tokenizer makes none."""
    ids: list[int] = loaded.tokenizer(_TEXT, verbose=False)["input_ids"]
    if len(set(ids)) < 4:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            0, int(loaded.config.vocab_size), (count,), generator=generator
        ).tolist()
    return (ids * (count // len(ids) + 1))[:count]
