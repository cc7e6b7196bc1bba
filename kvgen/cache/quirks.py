"""What single model types do otherwise than their configuration lets expect.

Knows the attributes of models by name, nothing of transformers' cache protocol. Each entry was
found by holding the type against its own uncached forward (``docs/models.md``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvgen.cache.manager import KVCache
from kvgen.cache.recurrent import States

_OWN_CLASS = "insists on a cache class of its own"
_OWN_CONVENTION = "is called with other arguments at each step than this protocol's"
_REFUSED = {
    "minimax": _OWN_CLASS,
    "rwkv": _OWN_CLASS,
    "xlstm": _OWN_CLASS,
    "openai-gpt": "reads no cache",
    "cpmant": "adds prompt tokens of its own at every call",
    "gemma4_assistant": "reads the pairs of another model",
    "gemma4_unified_assistant": "reads the pairs of another model",
} | dict.fromkeys(("reformer", "xlnet", "xlm", "blt", "prophetnet", "moshi"), _OWN_CONVENTION)


def refusal(model_type: str) -> str | None:
    """Why kvgen's cache cannot serve this model type, or ``None``."""
    return _REFUSED.get(model_type)


_STARTING_OVER = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")


def starts_over(model_type: str) -> bool:
    """Whether a second forward over several tokens forgets the recurrent state of the first."""
    return model_type in _STARTING_OVER


def counts_own_positions(model: Any) -> bool:
    """Whether the model derives positions from its input ids and must not be given any.

    RoBERTa and its kin start counting after the padding id.
    """
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())


def state_holders(model: Any) -> list[Any]:
    """The modules in which a model keeps its recurrent states itself, in layer order; mostly none.

    recurrent_gemma does. Its states are lent to it for one forward (``lend_states``) and taken
    back after (``take_back_states``), so that they belong to one cache like all others.
    """
    return [module for module in model.modules() if hasattr(module, "conv1d_state")]


def lend_states(holders: list[Any], kv: KVCache) -> None:
    """Put the cache's states where the model looks for them."""
    for holder, states in _lent(holders, kv):
        holder.conv1d_state = states.convolution(0)
        holder.rg_lru.recurrent_states = states.recurrent(0)


def take_back_states(holders: list[Any], kv: KVCache) -> None:
    """Keep what the model made of the states, and leave none with it."""
    for holder, states in _lent(holders, kv):
        states.set_convolution(holder.conv1d_state, 0)
        states.set_recurrent(holder.rg_lru.recurrent_states, 0)
        holder.conv1d_state = holder.rg_lru.recurrent_states = None


def _lent(holders: list[Any], kv: KVCache) -> Iterator[tuple[Any, States]]:
    """Each holder with the states that are its; ends with the holders."""
    own = (layer.states for layer in kv.layers if layer.states is not None)
    return zip(holders, own, strict=False)


def slots_are_positions(model: Any) -> bool:
    """Whether attention takes a key's place in the cache for its position.

    A linear bias on the distance (ALiBi) is laid over the keys as they come; rotary and learned
    positions travel with them.
    """
    return model.config.model_type in ("bloom", "mpt") or bool(getattr(model.config, "alibi", 0))


def takes_padding(model: Any) -> bool:
    """Whether a padding mask with one column per token is right at every step.

    GIT's code widens the mask by an image's tokens also where no image came.
    """
    return bool(model.config.model_type != "git")
