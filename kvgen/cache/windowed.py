"""``window:N,sink:M``: of a full-attention layer, only the first M and the last N tokens.

Attention gathers much of its weight on the first tokens of a sequence, whatever they say; keeping
them is what keeps a cut window usable (Xiao et al., StreamingLLM, 2023). Keys carry the absolute
positions they were stored with. A prompt, or a chunk of one, is still attended to whole while it
is being forwarded; what was cut before it is gone.

Imports torch only inside functions, once there are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar

from kvgen.cache.policy import PairSlots, Policy
from kvgen.cache.runs import Run
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import FULL, HYBRID, LayerSpec
from kvgen.cache.state import State
from kvgen.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_CUT = (FULL, HYBRID)


@dataclass(frozen=True)
class Window(Policy):
    """See the module."""

    description: ClassVar[str] = "full-attention layers cut to their first and last tokens"
    tolerance: ClassVar[float] = inf
    gaps: ClassVar[bool] = True
    window: int = 0
    """Newest tokens kept."""
    sink: int = 0
    """First tokens kept."""

    def __post_init__(self) -> None:
        """Raises ``UsageError`` without a window."""
        if self.window < 1 or self.sink < 0:
            raise UsageError(
                "write the tokens to keep as window:N or window:N,sink:M, such as window:512,sink:4"
            )

    @property
    def note(self) -> str:
        """That tokens are gone."""
        first = f"the first {self.sink} and " if self.sink else ""
        return (
            f"full-attention layers keep {first}the last {self.window} tokens only, which changes "
            "the model's output"
        )

    def pair_bytes(self, spec: LayerSpec, tokens: int, itemsize: int) -> int:
        """Those of the tokens kept."""
        kept = min(tokens, self.sink + self.window) if spec.kind in _CUT else tokens
        return spec.pair_bytes(kept, itemsize)

    def slots(self, spec: LayerSpec) -> PairSlots:
        """Empty slots; other kinds of layers are stored as ever."""
        if spec.kind not in _CUT:
            return TokenSlots(spec.window)
        return SinkSlots(self.sink, self.window)


class SinkSlots:
    """The first ``sink`` tokens, and the last ``window`` of those that follow."""

    def __init__(self, sink: int, window: int) -> None:
        """Both are numbers of tokens."""
        self._sink, self._window = sink, window
        self._first = Run(step=max(1, sink))
        # A sliding window of W keeps W - 1 tokens between updates.
        self._last = TokenSlots(window + 1)

    @property
    def length(self) -> int:
        """Tokens seen."""
        return len(self._first) + self._last.length

    @property
    def held(self) -> int:
        """Tokens a later update can still return."""
        return len(self._first) + self._last.held

    @property
    def views(self) -> tuple[Tensor, ...]:
        """What is held, oldest first."""
        return self._joined(self._first.views, self._last.views)

    @property
    def bytes_used(self) -> int:
        """Bytes of what is held."""
        return self._first.bytes_used + self._last.bytes_used

    def buffers(self) -> Sequence[Tensor]:
        """The memory owned."""
        return [*self._first.buffers(), *self._last.buffers()]

    def sizes(self, new: int) -> tuple[int, int]:
        """Tokens that ``update`` returns, and where the mask places the first of them.

        The mask counts backwards from the newest token without a gap. Every token that was kept
        then lies before the new ones, and so may be seen by all of them, as it should.
        """
        return self.held + new, self.length - self.held

    def update(self, *news: Tensor) -> tuple[Tensor, ...]:
        """Store tensors ``[batch, heads, new, dim]``; return those held before, then these."""
        before = tuple(self._first.views)
        missing = min(self._sink - len(self._first), news[0].shape[2])
        if missing:
            self._first.append(*(new[:, :, :missing] for new in news))
            before, news = self._first.views, tuple(new[:, :, missing:] for new in news)
        return self._joined(before, self._last.update(*news)) if news[0].shape[2] else before

    def can_trim(self, tokens: int) -> bool:
        """Whether the last ``tokens`` tokens can be taken back exactly."""
        return tokens == 0 or 0 < tokens <= self.length == self.held

    def trim(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens, which ``can_trim`` has allowed."""
        last = min(tokens, self._last.length)
        self._last.trim(last)
        self._first.drop_last(tokens - last)

    def reset(self) -> None:
        """Back to no tokens; buffers stay allocated."""
        self._first.clear()
        self._last.reset()

    def fork(self) -> SinkSlots:
        """An independent copy of what is held."""
        twin = SinkSlots(self._sink, self._window)
        twin._first, twin._last = self._first.copy(), self._last.fork()
        return twin

    def state(self) -> State:
        """The first tokens and the last."""
        state = State()
        state.put("first", self._first.state())
        state.put("last", self._last.state())
        return state

    def load(self, state: State) -> None:
        """Take the place of the slots that gave ``state``."""
        self._first.load(state.part("first"))
        self._last.load(state.part("last"))

    def _joined(self, first: Sequence[Tensor], last: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not (first and first[0].shape[2]):
            return tuple(last)
        if not last:
            return tuple(first)
        import torch

        return tuple(torch.cat(pair, dim=2) for pair in zip(first, last, strict=True))
