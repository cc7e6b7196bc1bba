"""Which forward a run goes through: the model's own, or one whose step is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgen.cache.policy import Policy
from kvgen.cache.spec import LayerSpec
from kvgen.cache.stepwise import in_blocks
from kvgen.engine.compiled import CompiledForward
from kvgen.engine.forward import Forward
from kvgen.engine.traced import BLOCK, CannotCompileError
from kvgen.measure.facts import is_spread
from kvgen.measure.records import Compilation
from kvgen.models import LoadedModel
from kvgen.models.ranks import current
from kvgen.models.types import ProgressCallback


class Chosen(NamedTuple):
    """A forward, the storage that suits it, and what is to be said of it."""

    forward: Forward
    policy: Policy
    compilation: Compilation | None = None
    note: str | None = None


def compiled_forward(
    loaded: LoadedModel, specs: Sequence[LayerSpec], progress: ProgressCallback
) -> tuple[CompiledForward, Compilation]:
    """Raises ``CannotCompileError`` with the reason, as the end of a sentence on the model."""
    if is_spread(loaded.model) or current() is not None:
        raise CannotCompileError("is divided over several devices or ranks")
    forward = CompiledForward(loaded.model, specs, progress)
    return forward, Compilation(*forward.compilation)


def compiled_or_not(
    loaded: LoadedModel, policy: Policy, specs: Sequence[LayerSpec], progress: ProgressCallback
) -> Chosen:
    """A compiled step, or the model's own with the reason why.

    Raises ``UsageError`` for a policy that a compiled step cannot read, or without a compiler.
    """
    blocks = in_blocks(policy, BLOCK)
    try:
        forward, compilation = compiled_forward(loaded, specs, progress)
    except CannotCompileError as reason:
        note = f"not compiled: {loaded.config.model_type} {reason}"
        return Chosen(Forward(loaded.model, loaded.attention, loaded.products), policy, None, note)
    return Chosen(forward, blocks, compilation)
