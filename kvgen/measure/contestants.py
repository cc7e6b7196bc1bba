"""Ways of computing the same tokens, behind the same few verbs, so that a comparison is one loop.

``fill(prefix, capacity)``  outside the timer, once per depth: compute what is retained
``begin(ids, forced)``      outside the timer, before each run: a fresh start from the filled prefix
``steps()``                 the run itself: one latency and one row of logits per new token

``forced`` are the ids every contestant is led through, whatever it would choose; choosing is still
part of a step. ``None`` lets it choose greedily.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from kvgen.cache.adapter import TransformersCache, policy_for, specs_for
from kvgen.cache.manager import KVCache
from kvgen.cache.policies import DEFAULT
from kvgen.cache.rivals import RivalCache
from kvgen.cache.stepwise import in_blocks
from kvgen.engine.decoder import Decoder, Token
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.engine.traced import BLOCK, CannotCompileError
from kvgen.errors import ModelError
from kvgen.measure.clock import Clock
from kvgen.measure.comparison_records import ContestantFacts, Kind
from kvgen.measure.compilation import compiled_forward
from kvgen.measure.roofline import WeightReads
from kvgen.models import LoadedModel
from kvgen.models.types import ProgressCallback

# A prefix is filled in pieces, so that no attention matrix of a whole long prefix is ever held.
_FILL_CHUNK = 1024


class TimedStep(NamedTuple):
    """One new token: its cost, the logits ``[vocab]`` it is chosen from, the tokens forwarded."""

    latency_s: float
    logits: Tensor
    token_id: int
    forwarded: int


class ForcedSampler(Sampler):
    """Chooses greedily, at the usual cost, then hands on the id that was asked for."""

    def __init__(self, forced: list[int] | None) -> None:
        """``None`` keeps the choice."""
        super().__init__(SamplingOptions())
        self._forced = iter(forced) if forced is not None else None

    def choose(self, logits: Tensor, ids: list[int]) -> int:
        """The next forced id, or the likeliest one."""
        best = super().choose(logits, ids)
        return best if self._forced is None else next(self._forced)


class Contestant(ABC):
    """See the module. ``facts`` is what the record says of it."""

    cache: KVCache | RivalCache | None = None
    """Of the current run; ``None`` for a contestant that retains nothing."""
    lossy: float | None = None
    """How far its logits may move by design, relative to the largest; ``None``: not at all."""
    rotary_change: int | None = None
    """Tokens past which its model makes keys with another rotary base; ``None``: never."""

    def __init__(self, loaded: LoadedModel, kind: Kind, name: str, description: str) -> None:
        self.loaded = loaded
        self.rotary_change = loaded.rotary_change
        self.weights = WeightReads(loaded.model)
        self.forward = Forward(loaded.model, loaded.attention, loaded.products)
        self.facts = ContestantFacts(
            name=name,
            description=description,
            kind=kind,
            dtype=loaded.dtype_name,
            weight_bytes=self.weights.total,
        )

    @abstractmethod
    def fill(self, prefix: list[int], capacity: int) -> None:
        """Compute what is retained of ``prefix``; later runs end within ``capacity`` tokens."""

    @abstractmethod
    def begin(self, ids: list[int], forced: list[int] | None) -> None:
        """Start anew at the filled prefix, with which ``ids`` begins."""

    @abstractmethod
    def steps(self, count: int, clock: Clock) -> Iterator[TimedStep]:
        """Run ``count`` steps, the first of which is the prefill."""

    @property
    def bytes_used(self) -> int:
        """Bytes of pairs the current run holds."""
        return 0 if self.cache is None else self.cache.bytes_used

    @property
    def bytes_allocated(self) -> int:
        """Bytes of storage the current run owns for them."""
        return 0 if self.cache is None else self.cache.bytes_allocated


class _Steps(Protocol):
    ids: list[int]

    def step(self) -> Token: ...


class StepContestant(Contestant):
    """What is driven step by step, through an object that has ``ids`` and ``step()``."""

    decoder: _Steps

    def steps(self, count: int, clock: Clock) -> Iterator[TimedStep]:
        """Each step between two readings of the clock."""
        for _ in range(count):
            pending = self.pending
            self.ready()
            begin = clock.now()
            token = self.decoder.step()
            latency = clock.now() - begin
            yield TimedStep(latency, token.logits, token.id, pending)

    def ready(self) -> None:
        """What comes before a step and is no part of it."""

    @property
    def pending(self) -> int:
        """Tokens the next step forwards: those that the cache does not hold."""
        return len(self.decoder.ids) - (0 if self.cache is None else self.cache.position)


class Uncached(StepContestant):
    """Every step forwards everything again. A prefix needs no work: it is only ids."""

    def __init__(self, loaded: LoadedModel, name: str = "no-cache") -> None:
        super().__init__(loaded, "no-cache", name, "the whole prefix again at every step")

    def fill(self, prefix: list[int], capacity: int) -> None:
        """Nothing is retained."""

    def begin(self, ids: list[int], forced: list[int] | None) -> None:
        """The ids, and no cache."""
        self.decoder = Decoder(self.forward, ids, ForcedSampler(forced), None)


class Cached(StepContestant):
    """kvgen's cache under one of its storage policies."""

    decoder: Decoder
    cache: KVCache

    def __init__(self, loaded: LoadedModel, name: str, policy: str = DEFAULT) -> None:
        """Raises ``UsageError`` for an unknown policy."""
        self._policy = policy_for(loaded.model, policy)
        super().__init__(loaded, "cache", name, f"kvgen's cache, {self._policy.description}")
        self.lossy = self._policy.tolerance
        self._specs = specs_for(loaded.model)
        self._filled_ids: list[int] = []
        self._filled = self.cache = self._policy.make(self._specs)

    def fill(self, prefix: list[int], capacity: int) -> None:
        """Forward the prefix into a cache that runs fork; a longer one continues a shorter."""
        held = len(self._filled_ids)
        policy = self._policy.for_tokens(capacity)
        if prefix[:held] != self._filled_ids or policy != self._filled.policy:
            self._filled = policy.make(self._specs)
            held = 0
        if len(prefix) > held:
            self.forward.extend(prefix[held:], TransformersCache(self._filled), _FILL_CHUNK)
        self._filled_ids = list(prefix)

    def begin(self, ids: list[int], forced: list[int] | None) -> None:
        """A fork of the filled cache."""
        self.cache = self._filled.fork()
        self.decoder = Decoder(self.forward, ids, ForcedSampler(forced), self.cache)

    def ready(self) -> None:
        """As the decoder's."""
        self.decoder.ready()


class Compiled(Cached):
    """kvgen's cache, read and written by a compiled step."""

    def __init__(self, loaded: LoadedModel, name: str, progress: ProgressCallback) -> None:
        """Raises ``ModelError`` for a model whose step cannot be compiled."""
        super().__init__(loaded, name)
        self._policy = in_blocks(self._policy, BLOCK)
        self._filled = self.cache = self._policy.make(self._specs)
        try:
            self.forward, self.facts.compilation = compiled_forward(loaded, self._specs, progress)
        except CannotCompileError as reason:
            raise ModelError(
                f"{loaded.config.model_type} {reason}, so its step cannot be compiled; leave out "
                "--compile"
            ) from reason
        self.facts.description = "kvgen's cache, the step compiled"
