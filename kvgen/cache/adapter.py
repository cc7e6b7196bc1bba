"""How kvgen's cache speaks transformers' cache protocol. The only file that knows it.

transformers' models take a ``Cache`` and ask it how wide the mask must be (``get_mask_sizes``,
before the update), where the queries are (``get_seq_length``), and to store and return pairs or
states (``update`` and its kin). ``TransformersCache`` answers from a ``KVCache``; it subclasses the
library's class because several models test the type, and uses none of its storage. Some models
reach into ``cache.layers[i]``; they find a ``_LayerView`` there.

What differs between releases is settled here by what the installed one offers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor

from kvgen.cache.layers import Layer
from kvgen.cache.manager import KVCache
from kvgen.cache.policies import find_policy
from kvgen.cache.policy import Policy
from kvgen.cache.quirks import refusal, slots_are_positions, starts_over
from kvgen.cache.recurrent import States
from kvgen.cache.settings import Settings
from kvgen.cache.shapes import specs_from_config
from kvgen.cache.shares import share_of
from kvgen.cache.spec import NOTHING, LayerSpec
from kvgen.errors import ModelError, UsageError

SUPPORTED = "5.5 or newer"

try:
    from transformers.cache_utils import Cache
except ImportError as error:
    raise ModelError(
        f"transformers {transformers.__version__} has no cache that kvgen can take the place of; "
        f"kvgen supports transformers {SUPPORTED}"
    ) from error

# Projections whose output holds keys, alone or with others.
_MAKING_KEYS = {"k_proj", "qkv_proj", "query_key_value", "kv_b_proj"}
# Models of earlier releases want the kept inputs alone back, and read states as attributes.
_RETURNS_EVERY_INPUT = hasattr(Cache, "get_conv_state")


def cache_argument(model: Any) -> str:
    """The name by which this model's forward takes a cache.

    Raises ``ModelError`` when it takes none, so that nothing is generated on a wrong assumption.
    """
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise ModelError(
        f"{type(model).__name__} (transformers {transformers.__version__}) takes no cache in its "
        f"forward; kvgen supports transformers {SUPPORTED}. Run without a cache: --no-cache"
    )


def specs_for(model: Any) -> list[LayerSpec]:
    """What each cache layer of this model stores, as the installed release makes it; of a model
    whose heads are shared out over ranks, what this rank stores.

    Raises ``ModelError`` for a model that kvgen's cache cannot serve, with the reason.
    """
    model_type = model.config.model_type
    if (reason := refusal(model_type)) is not None:
        raise ModelError(f"{model_type} {reason}; run it without a cache: --no-cache")
    cache_argument(model)
    config = model.config.get_text_config(decoder=True)
    # Since the release that has this method, latent attention hands over the latent itself.
    expands = not any(hasattr(module, "expand_kv") for module in model.modules())
    specs = specs_from_config(config, expand_latent=expands)
    return share_of(specs, Settings(config), model.tp_size or 1) if _shares_heads(model) else specs


def _shares_heads(model: Any) -> bool:
    """Whether the model's parallel plan gives each rank keys of its own heads."""
    plan = getattr(model, "tp_plan", None) or {}
    made_by = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    return bool(made_by & _MAKING_KEYS)


def continues_prefill(model: Any, specs: Sequence[LayerSpec]) -> bool:
    """Whether a second forward over several tokens goes on from the state of the first.

    The code of a few recurrent models starts over, and that of nearly all in earlier releases; one
    token at a time they do go on. ``specs`` are the model's.
    """
    if not any(spec.has_states for spec in specs):
        return True
    return _RETURNS_EVERY_INPUT and not starts_over(model.config.model_type)


def policy_for(model: Any, text: str) -> Policy:
    """The storage policy that ``text`` names (see ``find_policy``).

    Raises ``UsageError`` for an unknown one, and for one that does not suit the model.
    """
    policy = find_policy(text)
    if policy.gaps and slots_are_positions(model):
        raise UsageError(
            f"{model.config.model_type} tells a token's distance by its place in the cache, so no "
            f"token may be missing; --cache {text} does not suit it"
        )
    return policy


class TransformersCache(Cache):  # type: ignore[misc]  # transformers publishes no types
    """A ``KVCache`` as transformers' models see it."""

    def __init__(self, kv: KVCache) -> None:
        """``kv`` stays the owner of buffers and position; this object holds no state."""
        super().__init__(layers=[])
        self.kv = kv
        self.layers = [_LayerView(layer) for layer in kv.layers]
        specs = kv.specs
        self._windowed = [spec.window is not None for spec in specs]
        self._linear = [spec.has_states and not spec.has_pairs for spec in specs]
        self._dummy = [spec.kind == NOTHING for spec in specs]
        self._first_pairs = next((i for i, spec in enumerate(specs) if spec.has_pairs), None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``[batch, heads, new, dim]`` and return every pair the new queries may read."""
        layer = self.kv.layers[layer_idx]
        if layer.pairs is None:
            raise ModelError(
                f"layer {layer_idx} stores pairs, but a {layer.spec.kind} layer has none"
            )
        if layer.spec.value_dim == 0:  # values are the very keys
            (both,) = layer.pairs.update(key_states)
            return both, both
        keys, values = layer.pairs.update(key_states, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Width of the mask for a layer, and the absolute position of its first column."""
        pairs = self.kv.layers[layer_idx].pairs
        if pairs is None and self._first_pairs is not None:
            pairs = self.kv.layers[self._first_pairs].pairs
        return (self.kv.position + query_length, 0) if pairs is None else pairs.sizes(query_length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the ones being forwarded: the manager's position, for every layer."""
        return self.kv.position

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store an indexer's keys ``[batch, new, dim]`` and return all of them."""
        return self.layers[layer_idx].update_index(indexer_key_states.unsqueeze(1))[:, 0]

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a recurrent layer (the last one if not named) has seen a token."""
        if layer_idx is None:
            layer_idx = max(i for i, spec in enumerate(self.kv.specs) if spec.has_states)
        return self._states(layer_idx).started(state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, or ``None`` before the first token."""
        return self._states(layer_idx).convolution(state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Follow a convolution by new inputs; returns those kept before, then these."""
        states = self._states(layer_idx)
        every = states.add_inputs(conv_states, state_idx, conv_kernel_size)
        if _RETURNS_EVERY_INPUT:
            return every
        kept = states.convolution(state_idx)
        assert kept is not None
        return kept

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrent state, or ``None`` before the first token."""
        return self._states(layer_idx).recurrent(state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replace a recurrent state; returns the one kept."""
        return self._states(layer_idx).set_recurrent(recurrent_states, state_idx)

    def _states(self, layer_idx: int) -> States:
        states = self.kv.layers[layer_idx].states
        if states is None:
            raise ModelError(f"layer {layer_idx} has no recurrent state to ask for")
        return states

    @property
    def is_sliding(self) -> list[bool]:
        """Per layer; transformers sizes the sliding mask from the first that says True."""
        return self._windowed

    @property
    def is_linear(self) -> list[bool]:
        """Per layer whether it keeps recurrent states only."""
        return self._linear

    @property
    def is_dummy(self) -> list[bool]:
        """Per layer whether it keeps nothing."""
        return self._dummy

    @property
    def is_compileable(self) -> bool:
        """Whether buffers have fixed addresses; ours grow."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Buffers are made at the first update."""
        return self.kv.position > 0

    def __len__(self) -> int:
        """Layers."""
        return len(self.kv.layers)


_POOLS = {"compressor": 0, "indexer": 1}


class _LayerView:
    """One layer under the names by which some models read it directly."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.is_sliding = layer.spec.window is not None

    @property
    def is_initialized(self) -> bool:
        return bool(self._layer.buffers())

    @property
    def keys(self) -> Tensor | None:
        return self._layer.pairs.views[0] if self._layer.pairs and self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        return self._layer.pairs.views[-1] if self._layer.pairs and self.is_initialized else None

    # Earlier releases read states, and what goes with them, as plain attributes.

    @property
    def device(self) -> Any:
        return self._layer.buffers()[0].device

    def get_seq_length(self) -> int:
        """Tokens seen by the layer's pairs."""
        return self._layer.pairs.length if self._layer.pairs else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As the cache's, for this layer."""
        assert self._layer.pairs is not None
        return self._layer.pairs.sizes(query_length)

    @property
    def conv_states(self) -> Tensor | None:
        return self._layer.states.convolution(0) if self._layer.states else None

    @property
    def recurrent_states(self) -> Tensor | None:
        return self._layer.states.recurrent(0) if self._layer.states else None

    # An indexer's keys, and the positions that go with them.

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Store ``[batch, 1, new, dim]`` and return all."""
        assert self._layer.index is not None
        return self._layer.index.update(idx_k)[0]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        slots = self._layer.index_positions
        return slots.views[0][..., 0] if slots and slots.length else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, every: Tensor) -> None:
        # The model hands back the old positions followed by the new, [rows, batch, tokens].
        slots = self._layer.index_positions
        assert slots is not None
        slots.update(every[..., slots.length :].unsqueeze(-1))

    # Compressed attention.

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        return self._layer.pools[_POOLS[name]].add_tokens(kv, gate)

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        return self._layer.pools[_POOLS[name]].add_entries(compressed)

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        newest = (slice(None), -1, slice(None), slice(head_dim))
        return self._layer.pools[_POOLS[name]].swap_last(chunk_kv[newest], chunk_gate[newest])
