"""The arithmetic of one token in one layer, written so that a compiler makes fast loops of it.

A decode step multiplies one row by every weight. Written as a product and a sum over the weight's
rows, that becomes a loop which reads each weight once, in the order in which it lies in memory, at
about the speed of memory; BLAS, made for many rows, comes to a third of it. Knows torch and the two
interfaces that transformers' models call attention and the cache through; nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvgen.cache.adapter import TransformersCache
from kvgen.cache.manager import KVCache
from kvgen.errors import KvgenError

BLOCK = 32
"""Slots that attention reads at a time; buffers are a whole number of them."""
_NEVER = -1e30  # of a masked score; infinity less infinity would be no number
_WITHOUT_EFFECT = ("position_ids", "cache_position")


class CannotCompileError(KvgenError):
    """Why a model's step cannot be compiled, as the end of a sentence about the model."""


class RowProducts(TorchFunctionMode):  # type: ignore[misc]  # torch is read without its types
    """Within it, a linear layer over a single row is a product and a sum."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        if func is torch.nn.functional.linear:
            return row_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def row_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` summed in float32; ``input`` ends in one row, ``[1, in]``."""
    row = _kept(_wide(input))  # or it would be widened again for every row of the weight
    result = (_wide(weight) * row.unsqueeze(-2)).sum(-1)
    if bias is not None:
        result = result + _wide(bias)
    return result.to(input.dtype)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query ``[1, heads, 1, dim]``, as ``[1, 1, heads, value_dim]``.

    ``keys`` and ``values`` are ``[1, groups, blocks, block, dim]``; ``seen`` says which of their
    slots hold what the query may read, ``[blocks, block]``. Keys and values are read once, for all
    the heads of a group; values in blocks that are summed apart and then together, so that the work
    divides over threads (as in Flash-Decoding, Dao et al., 2023).
    """
    groups = keys.shape[1]
    each = _wide(query).reshape(1, groups, -1, query.shape[-1]) * scaling
    each = _kept(each)  # or it would be rotated again for every key
    keys, values, heads = _wide(keys), _wide(values), range(each.shape[2])
    # One head at a time, which become one loop. As a dimension they would read the keys again.
    products = [(each[:, :, head, None, None, :] * keys).sum(-1) for head in heads]
    if softcap is not None:
        products = [softcap * torch.tanh(scores / softcap) for scores in products]
    masked = [torch.where(seen, scores, _NEVER) for scores in products]
    scores = torch.stack(masked, 2).flatten(3)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        own = _wide(sinks).reshape(1, groups, -1, 1)
        top = torch.maximum(top, own)
    parts = _kept(torch.exp(scores - top))
    total = parts.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(own - top)
    parts = parts.unflatten(3, seen.shape)
    reads = [(parts[:, :, head].unsqueeze(-1) * values).sum(-2) for head in heads]
    result = torch.stack(reads, 2).sum(-2) / total
    return result.flatten(1, 2).to(query.dtype).unsqueeze(1)


class TracedCache(TransformersCache):
    """Takes one layer's new pair into given buffers, and hands on the blocks to be read."""

    def __init__(self, kv: KVCache, buffers: Sequence[Tensor], slots: Tensor, span: Tensor) -> None:
        """Buffers for keys and values are ``[1, heads, capacity, dim]``.

        ``slots`` are the numbers of those to be read, ``[blocks, block]``; ``span`` holds the first
        that may be, and the token's own.
        """
        super().__init__(kv)
        self._buffers = buffers
        self._slots, self._span = slots, span
        self.updates = 0

    @property
    def seen(self) -> Tensor:
        """Which of ``slots`` the token may read."""
        return (self._slots >= self._span[0]) & (self._slots <= self._span[1])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[1, heads, 1, dim]``; the blocks, ``[1, heads, blocks, block, dim]``."""
        self.updates += 1
        blocks, size = self._slots.shape
        both = []
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            torch._check(blocks * size <= buffer.shape[2])
            buffer.index_copy_(2, self._span[1:], new.to(buffer.dtype))
            both.append(buffer[:, :, : blocks * size].unflatten(2, (blocks, size)))
        return both[0], both[1]

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """As transformers' attention interface wants it. No mask: ``seen`` is the whole of it."""
        strange = [
            name
            for name, value in others.items()
            if isinstance(value, Tensor) and name not in _WITHOUT_EFFECT
        ]
        if strange or key.dim() != 5:
            raise CannotCompileError(
                f"its attention takes {strange[0]}" if strange else "it works on stored keys"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, self.seen, scale, softcap, s_aux), None


def _kept(tensor: Tensor) -> Tensor:
    """The same, computed once into memory: the compiler would repeat it wherever it is used."""
    return tensor.as_strided(tensor.shape, tensor.stride())


def _wide(tensor: Tensor) -> Tensor:
    """In an arithmetic that sums can be made in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
