"""The KV cache of one forward stream: one layer object per decoder layer and one position.

Knows layers and specs, nothing of transformers or models.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.cache.layers import Layer
from kvgen.cache.policy import Policy
from kvgen.cache.slots import storage_bytes
from kvgen.cache.spec import LayerSpec, total_bytes
from kvgen.cache.state import State
from kvgen.cache.stepwise import Step


class KVCache:
    """Layers built from specs, and the absolute position that all of them have reached.

    A forward over n tokens first updates every layer, then ``advance(n)`` moves the position and
    checks that each layer really saw those n tokens: a model that ignores its cache, or a layer
    that was left out, is found at the first step.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], step: int = 256, policy: Policy | None = None
    ) -> None:
        """``policy`` says how pairs are stored; without one, buffers that grow by ``step`` slots
        (see ``TokenSlots``).
        """
        self.specs = tuple(specs)
        self.policy = policy or Step(step)
        self.layers = [Layer(spec, self.policy) for spec in self.specs]
        self.position = 0

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` forwarded tokens. Raises ``CacheStateError`` if a layer missed any."""
        reached = self.position + tokens
        for layer in self.layers:
            layer.settle(reached)
        self.position = reached

    def refusal(self, tokens: int) -> str | None:
        """Why the last ``tokens`` tokens cannot be taken back; ``None`` if they can."""
        refusing = self._refusing(tokens)
        return refusing[0].refusal if refusing else None

    def trim(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens in every layer.

        Raises ``CannotTrimError`` if any layer cannot, and then changes nothing.
        """
        for layer in self._refusing(tokens) or self.layers:  # the first that refuses raises
            layer.trim(tokens)
        self.position -= tokens

    def _refusing(self, tokens: int) -> list[Layer]:
        return [layer for layer in self.layers if not layer.can_trim(tokens)]

    def reset(self) -> None:
        """Back to position 0."""
        for layer in self.layers:
            layer.reset()
        self.position = 0

    def fork(self) -> KVCache:
        """An independent cache with the same content."""
        twin = KVCache(self.specs, policy=self.policy)
        twin.layers = [layer.fork() for layer in self.layers]
        twin.position = self.position
        return twin

    def state(self) -> State:
        """What every layer holds, and the position. Tensors are views: use them before the next
        forward.
        """
        state = State(numbers={"position": self.position})
        for index, layer in enumerate(self.layers):
            state.put(f"layers.{index}", layer.state())
        return state

    def load(self, state: State) -> None:
        """Hold what the cache of the same specs and policy held that gave ``state``."""
        for index, layer in enumerate(self.layers):
            layer.load(state.part(f"layers.{index}"))
        self.position = state.numbers["position"]

    def drop_unfinished(self) -> bool:
        """Take back what a forward that broke off has left in some layers.

        Returns whether every layer now stands at ``position``; a cache where one does not can only
        be reset.
        """
        return all(layer.drop_unfinished(self.position) for layer in self.layers)

    def bytes_formula(self, itemsize: int, batch: int = 1) -> int | None:
        """Bytes that the specs predict at this position; ``None`` where a layer has no rule."""
        return total_bytes(self.specs, self.position, itemsize, batch, self.policy)

    @property
    def bytes_used(self) -> int:
        """Bytes held for later queries, counted on the real tensors."""
        return sum(layer.bytes_used for layer in self.layers)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storage owned, each storage counted once."""
        return storage_bytes(buffer for layer in self.layers for buffer in layer.buffers())
