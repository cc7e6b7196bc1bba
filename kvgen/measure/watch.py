"""What really happens inside one forward: shapes at the embedding, at the cache and in attention,
and the operations done. Watches torch and kvgen's own cache; changes nothing that is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from kvgen.cache.adapter import TransformersCache


@dataclass
class LayerSeen:
    """Shapes at one layer: what was handed to the cache, what came back, what attended."""

    key_shape: list[int] | None = None
    value_shape: list[int] | None = None
    keys_returned: int | None = None
    query_shape: list[int] | None = None
    keys_attended: int | None = None


@dataclass
class Seen:
    """One forward: ids ``[batch, tokens]``, layers by index, multiplications plus additions."""

    input_shape: list[int]
    layers: dict[int, LayerSeen] = field(default_factory=dict)
    operations: int = 0
    attention_operations: int = 0


class WatchedCache(TransformersCache):
    """Our cache, telling a watch what passes through it."""

    watch: Watch | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As ``TransformersCache.update``."""
        pairs = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.watch is not None:
            self.watch.stored(layer_idx, key_states, value_states, pairs[0])
        return pairs


class Watch(TorchFunctionMode):  # type: ignore[misc]  # torch is read without its types
    """A context around one forward of ``model``; afterwards ``seen`` says what happened.

    Attention is found where torch's own kernel is called, or else at the first product of queries
    with the keys that the cache returned.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        """``tokens`` come in, one sequence: what holds should the embedding see no ids."""
        super().__init__()
        self.seen = Seen([1, tokens])
        self._model = model
        self._layer: int | None = None
        self._counter = FlopCounterMode(display=False)
        self._handles: list[Any] = []
        self._attention_counted = 0
        self._embedded = False

    def __enter__(self) -> Watch:
        embedding = self._model.get_input_embeddings()
        self._handles = [embedding.register_forward_pre_hook(self._embeds)]
        for module in self._model.modules():
            if type(getattr(module, "layer_idx", None)) is int:
                self._handles.append(module.register_forward_pre_hook(self._enters))
        self._counter.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._counter.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        total = int(self._counter.get_total_flops())
        self.seen.operations = total - self._attention_counted + self.seen.attention_operations

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._attends(func, args, kwargs)
        if func in _PRODUCTS:
            self._may_attend(*_factors(args, kwargs))
        return func(*args, **kwargs)

    def stored(self, layer: int, keys: Tensor, values: Tensor, returned: Tensor) -> None:
        """Keys and values ``[batch, heads, new, dim]`` came to the cache of ``layer``."""
        self._layer = layer
        seen = self._at(layer)
        seen.key_shape, seen.value_shape = list(keys.shape), list(values.shape)
        seen.keys_returned = returned.shape[2]

    def _attends(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before = self._counter.get_total_flops()
        result = func(*args, **kwargs)
        # What the counter knows of torch's kernels differs by device; ours is one rule for all.
        self._attention_counted += self._counter.get_total_flops() - before
        query, key, value = (*args, *(kwargs[n] for n in _NAMES[len(args) :]))[:3]
        rows = math.prod(query.shape[:-1]) * key.shape[-2]
        self.seen.attention_operations += 2 * rows * (query.shape[-1] + value.shape[-1])
        self._note_query(query, key.shape[-2])
        return result

    def _may_attend(self, left: Any, right: Any) -> None:
        if self._layer is None or not (torch.is_tensor(left) and torch.is_tensor(right)):
            return
        seen = self._at(self._layer)
        shapes_fit = left.ndim == right.ndim >= 3 and left.shape[-1] == right.shape[-2]
        keys_fit = seen.key_shape is not None and right.shape[-1] == seen.keys_returned
        if shapes_fit and keys_fit and seen.key_shape and left.shape[-2] == seen.key_shape[2]:
            self._note_query(left, right.shape[-1])

    def _note_query(self, query: Tensor, keys: int) -> None:
        if self._layer is not None and self._at(self._layer).query_shape is None:
            seen = self._at(self._layer)
            batch, dim = self.seen.input_shape[0], query.shape[-1]
            fed = seen.key_shape[2] if seen.key_shape else self.seen.input_shape[-1]
            # Some callers fold heads into the batch, or the queries that share a key into one axis.
            seen.query_shape = [batch, query.numel() // (batch * fed * dim), fed, dim]
            seen.keys_attended = keys

    def _at(self, layer: int) -> LayerSeen:
        return self.seen.layers.setdefault(layer, LayerSeen())

    def _embeds(self, module: Any, args: tuple[Any, ...]) -> None:
        if not self._embedded and args:
            self._embedded = True
            self.seen.input_shape = list(args[0].shape)

    def _enters(self, module: Any, args: Any) -> None:
        self._layer = module.layer_idx


_NAMES = ("query", "key", "value")
_PRODUCTS = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__),
    *(torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm),
)


def _factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The two factors of a product; the one with a summand names or ends with them."""
    if "batch2" in kwargs:
        return kwargs["batch1"], kwargs["batch2"]
    return (args[-2], args[-1]) if len(args) >= 2 else (None, None)
