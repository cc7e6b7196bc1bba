"""A decode step on CUDA as a graph: all of its kernels launched at once, by one call.

A graph is bound to the buffers it was captured with, so there is one for each set of them. Its
inputs, the token, its position and its place in every layer, are tensors that stay where they are.
Knows torch and the cache's slots; the model comes in as a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from kvgen.cache.slots import TokenSlots

_KEPT = 8  # graphs; those of caches that are gone make room for new ones


class StepGraphs:
    """The captured steps of one model."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.spans = torch.zeros(layers, 2, dtype=torch.long, device=device)
        """The first slot that may be read and the token's own, per layer."""
        self.captured = 0
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, slots: Sequence[TokenSlots], step: Callable[[], Tensor]) -> None:
        """Capture ``step`` on these buffers, if it is not yet; it must be one that may be repeated.

        ``step`` reads this object's tensors, and gives the logits ``[vocab]``.
        """
        key = _key(slots)
        if key in self._graphs:
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries set themselves up at their first call
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        if len(self._graphs) >= _KEPT:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = (graph, logits)
        self.captured += 1

    def set(self, token: int, position: int, spans: list[tuple[int, int]]) -> None:
        """What the next ``replay`` works on; ``spans`` as ``TokenSlots.claim`` gives them."""
        self.token.fill_(token)
        self.position.fill_(position)
        self.spans.copy_(torch.tensor([[begin, end - 1] for begin, end in spans]))

    def replay(self, slots: Sequence[TokenSlots]) -> Tensor:
        """Run the step that was captured on these buffers; a copy of its logits."""
        graph, logits = self._graphs[_key(slots)]
        graph.replay()
        return logits.clone()


def _key(slots: Sequence[TokenSlots]) -> Hashable:
    return tuple((b.data_ptr(), b.shape[2]) for each in slots for b in each.buffers())
