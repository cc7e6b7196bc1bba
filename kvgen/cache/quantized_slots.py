"""The tensors behind ``int8`` and ``int4``: codes and scales of old tokens, new ones as they are.

Knows torch, imported once there are tensors; nothing of transformers or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvgen.cache.runs import Run
from kvgen.cache.state import State

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Layout(Protocol):
    """What the slots need to know of their policy."""

    @property
    def bits(self) -> int:
        """8 or 4."""

    @property
    def keys(self) -> str:
        """``token`` or ``channel``."""

    @property
    def block(self) -> int:
        """Tokens that are quantised together."""

    def quantized_until(self, tokens: int) -> int:
        """Where, after ``tokens`` tokens, the first one that is kept as it is lies."""

    def groups(self, dim: int) -> int:
        """Groups along ``dim`` numbers of one token."""


class QuantizedSlots:
    """Tokens from ``_first`` to ``_until`` as codes, those from there to ``length`` as they are.

    ``_codes`` and ``_scales`` have an entry for each of the parallel tensors. Scales have one slot
    per token, or one per block where a group runs along the tokens.
    """

    def __init__(self, layout: Layout, window: int | None) -> None:
        """With a ``window`` of W, W - 1 tokens stay between updates."""
        self._layout = layout
        self._window = window
        self.length = 0
        self._until = 0
        self._first = 0
        self._new = Run(step=64)
        self._codes: list[Run] = []
        self._scales: list[Run] = []
        self._dims: list[int] = []
        self._dtype: torch.dtype | None = None

    @property
    def held(self) -> int:
        """Tokens a later update can still return."""
        return self.length if self._window is None else min(self.length, self._window - 1)

    @property
    def views(self) -> tuple[Tensor, ...]:
        """What is held, read back, ``[batch, heads, held, dim]`` each; empty before any."""
        return tuple(self._read(i) for i in range(len(self._dims)))

    @property
    def bytes_used(self) -> int:
        """Bytes of codes, scales and tokens kept as they are."""
        return sum(run.bytes_used for run in self._runs())

    def buffers(self) -> Sequence[Tensor]:
        """The memory owned."""
        return [buffer for run in self._runs() for buffer in run.buffers()]

    def sizes(self, new: int) -> tuple[int, int]:
        """Tokens that ``update`` with ``new`` ones returns, and the first's absolute position."""
        return self.held + new, self.length - self.held

    def update(self, *news: Tensor) -> tuple[Tensor, ...]:
        """Store tensors ``[batch, heads, new, dim]``; return those held before, then these.

        The new ones are returned as they came; later calls return them as they are stored.
        """
        import torch

        if not self._dims:
            self._made_for(news)
        result = news
        if self.held:
            pairs = zip(self.views, news, strict=True)
            result = tuple(torch.cat((old, new), dim=2) for old, new in pairs)
        self.length += news[0].shape[2]
        self._new.append(*news)
        self._settle()
        return result

    def can_trim(self, tokens: int) -> bool:
        """Whether the last ``tokens`` tokens can be taken back."""
        return tokens == 0 or 0 < tokens <= self.length == self.held

    def trim(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens, which ``can_trim`` has allowed.

        Tokens that count as new again are read back into their former place, rounded as they are.
        """
        if tokens == 0:
            return
        self.length -= tokens
        until = self._layout.quantized_until(self.length)
        if until < self._until:
            back = [self._read_codes(i)[:, :, until:] for i in range(len(self._dims))]
            kept = [view.clone() for view in self._new.views]
            self._new.clear()
            self._new.append(*back)
            self._new.append(*kept)
            for i in range(len(self._dims)):
                self._codes[i].drop_last(self._until - until)
                per_slot = self._tokens_per_scale(i)
                self._scales[i].drop_last((self._until - until) // per_slot)
            self._until = until
        self._new.drop_last(len(self._new) - (self.length - until))

    def reset(self) -> None:
        """Back to no tokens; buffers stay allocated."""
        self.length = self._until = self._first = 0
        for run in self._runs():
            run.clear()

    def fork(self) -> QuantizedSlots:
        """An independent copy of what is held."""
        twin = QuantizedSlots(self._layout, self._window)
        twin.length, twin._until, twin._first = self.length, self._until, self._first
        twin._dims, twin._dtype = list(self._dims), self._dtype
        twin._new = self._new.copy()
        twin._codes = [run.copy() for run in self._codes]
        twin._scales = [run.copy() for run in self._scales]
        return twin

    def state(self) -> State:
        """Codes, scales and new tokens, and the positions that part them."""
        state = State(numbers={"length": self.length, "until": self._until, "first": self._first})
        state.put("new", self._new.state())
        for i in range(len(self._dims)):
            state.put(f"codes.{i}", self._codes[i].state())
            state.put(f"scales.{i}", self._scales[i].state())
        return state

    def load(self, state: State) -> None:
        """Take the place of the slots that gave ``state``."""
        self.length, self._until, self._first = (
            state.numbers[name] for name in ("length", "until", "first")
        )
        self._new.load(state.part("new"))
        self._made_for(self._new.buffers())
        for i in range(len(self._dims)):
            self._codes[i].load(state.part(f"codes.{i}"))
            self._scales[i].load(state.part(f"scales.{i}"))

    def _made_for(self, tensors: Sequence[Tensor]) -> None:
        """Runs for parallel tensors such as these."""
        self._dims = [tensor.shape[3] for tensor in tensors]
        self._dtype = tensors[0].dtype if tensors else None
        self._codes = [Run() for _ in tensors]
        self._scales = [Run(self._scale_step(i)) for i in range(len(tensors))]

    def _runs(self) -> list[Run]:
        return [self._new, *self._codes, *self._scales]

    def _along_tokens(self, i: int) -> bool:
        return i == 0 and self._layout.keys == "channel"

    def _tokens_per_scale(self, i: int) -> int:
        return self._layout.block if self._along_tokens(i) else 1

    def _scale_step(self, i: int) -> int:
        return 8 if self._along_tokens(i) else 256

    def _settle(self) -> None:
        """Quantise what has become old, and forget what the window no longer reaches."""
        first, start = self.length - self.held, self.length - len(self._new)
        until = self._layout.quantized_until(self.length)
        if until > start:
            # Blocks that no query can see any more are not quantised only to be dropped.
            begin = max(start, first // self._layout.block * self._layout.block)
            if begin < until:
                self._quantize(begin, until)
            self._new.drop_first(until - start)
        self._until = until
        self._evict(first)
        self._new.give_back()

    def _quantize(self, begin: int, until: int) -> None:
        """Turn the new tokens from position ``begin`` to ``until`` into codes."""
        start = self.length - len(self._new)
        if begin > self._until or not len(self._codes[0]):  # nothing older is held
            self._clear_codes()
            self._first = begin
        for i, tensor in enumerate(self._new.views):
            codes, scales = self._encode(i, tensor[:, :, begin - start : until - start])
            self._codes[i].append(codes)
            self._scales[i].append(scales)

    def _evict(self, first: int) -> None:
        """Forget every token before position ``first``."""
        if first < self._until:
            for i, run in enumerate(self._codes):
                run.drop_first(first - self._first)
                slots = self._tokens_per_scale(i)
                self._scales[i].drop_first(first // slots - self._first // slots)
            self._first = first
        else:
            self._clear_codes()
            self._new.drop_first(first - (self.length - len(self._new)))

    def _clear_codes(self) -> None:
        for run in (*self._codes, *self._scales):
            run.clear()

    def _read(self, i: int) -> Tensor:
        import torch

        new = self._new.views[i]
        return torch.cat((self._read_codes(i), new), dim=2) if len(self._codes[i]) else new

    def _encode(self, i: int, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``[batch, heads, tokens, bytes]`` and scales ``[batch, heads, slots, 2 * n]``.

        ``n`` minima come first, then as many scales.
        """
        import torch

        count = tensor.shape[2]
        missing = -count % self._layout.block if self._along_tokens(i) else 0
        if missing:  # a window has taken the beginning of the block; its first token stands in
            tensor = torch.cat((tensor[:, :, :1].expand(-1, -1, missing, -1), tensor), dim=2)
        grouped = self._grouped(i, tensor.float())
        axis = 3 if self._along_tokens(i) else 4
        low, high = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
        low = _halved(low)
        levels = 2**self._layout.bits - 1
        # A scale rounded down would leave the largest numbers out of reach.
        scale = _halved((high - low).clamp(min=0) / levels * (1 + 2**-11)).clamp(min=2**-24)
        codes = ((grouped - low.float()) / scale.float()).round_().clamp_(0, levels)
        flat = codes.to(torch.uint8).reshape(tensor.shape)[:, :, missing:]
        both = torch.stack((low.squeeze(axis), scale.squeeze(axis)), dim=3)
        return self._packed(flat), both.flatten(3)

    def _read_codes(self, i: int) -> Tensor:
        (codes,), (scales,) = self._codes[i].views, self._scales[i].views
        numbers = self._unpacked(codes, self._dims[i])
        low, scale = scales.unflatten(3, (2, -1)).float().unbind(3)
        if self._along_tokens(i):
            # The window may begin within a block, whose scales stay until all of it is gone.
            block, tokens = self._layout.block, numbers.shape[2]
            offset = self._first % block
            low, scale = (
                t.repeat_interleave(block, dim=2)[:, :, offset : offset + tokens]
                for t in (low, scale)
            )
            return (numbers.float() * scale + low).to(self._dtype)
        grouped = numbers.float().unflatten(3, (scale.shape[3], -1))
        return (grouped * scale.unsqueeze(4) + low.unsqueeze(4)).flatten(3).to(self._dtype)

    def _grouped(self, i: int, tensor: Tensor) -> Tensor:
        """``[batch, heads, slots, ...]`` with the numbers of a group along one axis."""
        if self._along_tokens(i):
            return tensor.unflatten(2, (-1, self._layout.block))
        return tensor.unflatten(3, (self._layout.groups(tensor.shape[3]), -1))

    def _packed(self, codes: Tensor) -> Tensor:
        if self._layout.bits == 8:
            return codes
        from torch.nn.functional import pad

        even = pad(codes, (0, codes.shape[3] % 2))
        return even[..., 0::2] | (even[..., 1::2] << 4)

    def _unpacked(self, codes: Tensor, dim: int) -> Tensor:
        if self._layout.bits == 8:
            return codes
        import torch

        return torch.stack((codes & 15, codes >> 4), dim=4).flatten(3)[..., :dim]


def _halved(tensor: Tensor) -> Tensor:
    """In 16 bits, the largest number in place of infinity."""
    return tensor.clamp(-65504, 65504).half()
