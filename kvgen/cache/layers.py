"""One layer of the cache: the parts that its spec asks for, behind the same few verbs.

Knows torch and ``LayerSpec``, nothing of transformers or models. Each part keeps one sort of
thing: a policy's slots the pairs, ``TokenSlots`` one slot per token of anything else (an indexer's
keys), ``States`` a fixed size, ``Pool`` compressed entries. A new kind of layer is a new
combination, or one more part.
"""

from __future__ import annotations

from torch import Tensor

from kvgen.cache.compressed import Pool
from kvgen.cache.policy import PairSlots, Part, Policy
from kvgen.cache.recurrent import States
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import LayerSpec
from kvgen.cache.state import State
from kvgen.cache.stepwise import Step
from kvgen.errors import ModelError


class CannotTrimError(ValueError):
    """The tokens asked back are no longer there to restore."""


class CacheStateError(ModelError):
    """A model did not use the cache it was given."""


class Layer:
    """What one decoder layer keeps.

    ``pairs``, ``index``, ``index_positions``, ``states`` and ``pools`` are ``None`` or empty where
    the spec does not ask for them.
    """

    def __init__(self, spec: LayerSpec, policy: Policy | None = None) -> None:
        """``policy`` says how pairs are stored; ``Step()`` if not given."""
        self.spec = spec
        self.policy = policy or Step()
        step = self.policy.growth
        self.pairs: PairSlots | None = self.policy.slots(spec) if spec.has_pairs else None
        self.index = TokenSlots(step=step) if spec.index_dim else None
        self.index_positions = TokenSlots(step=step) if spec.index_positions else None
        self.states = States() if spec.has_states else None
        self.pools = [Pool(part.rate) for part in spec.compressed]

    @property
    def named_parts(self) -> dict[str, Part]:
        """The parts this layer has, by name."""
        each: dict[str, Part | None] = {
            "pairs": self.pairs,
            "index": self.index,
            "index_positions": self.index_positions,
            "states": self.states,
        }
        each |= {f"pools.{i}": pool for i, pool in enumerate(self.pools)}
        return {name: part for name, part in each.items() if part is not None}

    @property
    def parts(self) -> list[Part]:
        """The same without their names."""
        return list(self.named_parts.values())

    @property
    def _slots(self) -> list[PairSlots | TokenSlots]:
        """The parts with a slot per token, each of which counts the tokens it has seen."""
        each = (self.pairs, self.index, self.index_positions)
        return [slots for slots in each if slots is not None]

    def settle(self, reached: int) -> None:
        """After a forward: check that this layer has seen every token up to ``reached``.

        Raises ``CacheStateError``.
        """
        for slots in self._slots:
            if slots.length != reached:
                raise CacheStateError(
                    f"a {self.spec.kind} layer has stored {slots.length} tokens where {reached} "
                    "were forwarded: this model does not use the cache it is given; run it "
                    "without one: --no-cache"
                )
        if self.states is not None:
            if not self.states.used:
                raise CacheStateError(
                    f"a {self.spec.kind} layer left its states untouched: this model keeps them "
                    "somewhere else; run it without a cache: --no-cache"
                )
            self.states.used = False

    @property
    def bytes_used(self) -> int:
        """Bytes a later query can still read, counted on the tensors themselves."""
        return sum(part.bytes_used for part in self.parts)

    def buffers(self) -> list[Tensor]:
        """The memory this layer owns, whole."""
        return [buffer for part in self.parts for buffer in part.buffers()]

    def can_trim(self, tokens: int) -> bool:
        """Whether the last ``tokens`` tokens can be taken back exactly."""
        return all(part.can_trim(tokens) for part in self.parts)

    @property
    def refusal(self) -> str:
        """What keeps this layer from going back, where ``can_trim`` says that it cannot."""
        if self.states is not None:
            return f"a {self.spec.kind} layer's state sums up every token and cannot go back"
        if self.pools:
            return f"a {self.spec.kind} layer pools its tokens and cannot go back"
        return f"a {self.spec.kind} layer's window has let go of older tokens and cannot go back"

    def trim(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens. Raises ``CannotTrimError``, changing nothing."""
        if not self.can_trim(tokens):
            raise CannotTrimError(
                f"cannot take back {tokens} tokens: a {self.spec.kind} layer no longer holds "
                "what they replaced"
            )
        for part in self.parts:
            part.trim(tokens)

    def reset(self) -> None:
        """Back to no tokens."""
        for part in self.parts:
            part.reset()

    def fork(self) -> Layer:
        """An independent copy of what is held."""
        twin = Layer(self.spec, self.policy)
        twin.pairs = self.pairs and self.pairs.fork()
        twin.index = self.index and self.index.fork()
        twin.index_positions = self.index_positions and self.index_positions.fork()
        twin.states = self.states and self.states.fork()
        twin.pools = [pool.fork() for pool in self.pools]
        return twin

    def state(self) -> State:
        """What all parts hold."""
        state = State()
        for name, part in self.named_parts.items():
            state.put(name, part.state())
        return state

    def load(self, state: State) -> None:
        """Take the place of the layer of the same spec that gave ``state``."""
        for name, part in self.named_parts.items():
            part.load(state.part(name))

    def drop_unfinished(self, reached: int) -> bool:
        """Take back what a forward that broke off has stored past position ``reached``.

        Returns whether the layer now stands there.
        """
        for slots in self._slots:
            extra = slots.length - reached
            if extra < 0 or not slots.can_trim(extra):
                return False
            slots.trim(extra)
        touched = self.states is not None and self.states.used
        return not touched and all(pool.length == reached for pool in self.pools)
