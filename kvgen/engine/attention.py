"""Attention of one query over what a cache holds, which every layer computes in a decode step.

transformers' models look their attention up in its attention interface at every call. While a
single token is forwarded, ``OneQueryAttention`` stands there in place of what the model uses, with
the masks made for that. Forwards of several tokens never see it, an uncached one among them. Knows
torch and that interface; nothing of caches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvgen.errors import UsageError

# Models whose own attention is the usual one plus a soft cap or sinks, for which torch's kernel
# has no argument. What others that bring their own add to it, kvgen does not know.
_EAGER = ("gemma2", "vaultgemma", "gpt_oss", "mimo_v2_flash", "granite_swa", "granitemoe_swa")
# Keys from which on two matrix products beat torch's kernel on a CPU (docs/performance.md).
_MANY_KEYS = 768


class OneQueryAttention(AbstractContextManager[None]):
    """Within its ``with`` block, models set to use ``own`` attend as kvgen does."""

    def __init__(self, own: str) -> None:
        self.own = own
        self._library: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(own)

    def __enter__(self) -> None:
        # An entry of this one instance, as its class foresees; the library's own table stays.
        ALL_ATTENTION_FUNCTIONS[self.own] = self._attend

    def __exit__(self, *error: object) -> None:
        del ALL_ATTENTION_FUNCTIONS[self.own]

    def _attend(
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
    ) -> tuple[Tensor, Tensor | None]:
        """As the interface wants it; the model's own where there is more than one query."""
        several = query.shape[2] != 1 or query.shape[0] != key.shape[0]
        if several or others.get("position_bias") is not None:
            own = self._library or vars(sys.modules[type(module).__module__])[_EAGER_FUNCTION]
            more = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux} | others
            result: tuple[Tensor, Tensor | None] = own(
                module, query, key, value, attention_mask, **more
            )
            return result
        return attend(query, key, value, attention_mask, scaling, softcap, s_aux), None


_EAGER_FUNCTION = "eager_attention_forward"  # its name in every module of the library


def one_query_attention(model: Any, mode: str) -> OneQueryAttention | None:
    """What to forward a single token of ``model`` in, or ``None`` to leave it its own attention.

    ``mode`` is auto, model or kvgen; "auto" replaces only what is slow, on the CPU. Raises
    ``UsageError`` for "kvgen" and a model that attends in a way of its own.
    """
    if mode == "model" or (mode == "auto" and model.device.type != "cpu"):
        return None
    config = model.config.get_text_config(decoder=True)
    own = own_attention(model)
    known = own == "sdpa" or (own == "eager" and config.model_type in _EAGER)
    if known and any(_looks_attention_up(module) for module in model.modules()):
        return OneQueryAttention(own)
    if mode == "kvgen":
        raise UsageError(
            f"--attention kvgen: {config.model_type} computes attention in a way of its own that "
            "kvgen has no equal of; leave out --attention"
        )
    return None


def _looks_attention_up(module: Any) -> bool:
    code = sys.modules[type(module).__module__]
    return getattr(code, "ALL_ATTENTION_FUNCTIONS", None) is ALL_ATTENTION_FUNCTIONS


def own_attention(model: Any) -> str:
    """The library's name of the attention that ``model`` itself uses."""
    config = model.config.get_text_config(decoder=True)
    return str(getattr(config, "_attn_implementation", None) or "unknown")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query ``[batch, heads, 1, dim]`` per sequence; ``[batch, 1, heads, dim]``.

    ``key`` and ``value`` are ``[batch, kv_heads, keys, dim]``; each is read by ``heads / kv_heads``
    query heads and never repeated: those heads are the rows of one matrix (grouped queries, Ainslie
    et al., 2023). ``mask`` ``[batch, 1 or heads, 1, keys]`` is added to the scores, or says with
    True which keys are seen. ``scale`` is by default ``dim ** -0.5``. ``softcap`` c bends a score s
    to c * tanh(s / c) (Gemma 2, 2024, section 2). ``sinks`` ``[heads]`` are scores that take part
    in the softmax and have no value.
    """
    batch, heads, _, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    rows = (batch, kv_heads, heads // kv_heads)
    scale = dim**-0.5 if scale is None else scale
    plain = softcap is None and sinks is None and value.shape[3] == dim
    if plain and keys < _MANY_KEYS and query.dtype == torch.float32:
        grouped = {"enable_gqa": True} if kv_heads < heads else {}
        out = scaled_dot_product_attention(query, key, value, mask, scale=scale, **grouped)
        return out.transpose(1, 2)
    query = query.reshape(*rows, dim)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(*rows, keys)
    if plain and keys < _MANY_KEYS:
        out = scaled_dot_product_attention(query, key, value, mask, scale=scale)
    else:
        # Keys first: their many rows are read as they lie, and the few query rows stay at hand.
        scores = (key @ (query * scale).mT).mT.contiguous()
        out = _weights(scores, mask, softcap, sinks) @ value
    return out.reshape(batch, 1, heads, value.shape[3])


def _weights(
    scores: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The softmax of ``scores`` ``[batch, kv_heads, group, keys]`` over the keys."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1)
    with_sinks = torch.cat((scores, column.expand(scores.shape[0], -1, -1, -1)), dim=-1)
    return with_sinks.softmax(-1)[..., :-1]
