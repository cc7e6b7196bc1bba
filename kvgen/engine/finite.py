"""Where a model's numbers stop being finite. Knows torch; the model comes from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvgen.errors import ModelError


class NotFiniteError(ModelError):
    """Logits of which the likeliest is no finite number."""


def check_finite(logits: Tensor) -> None:
    """Raise ``NotFiniteError`` for logits that hold NaN or plus infinity, as after an overflow."""
    if not logits.max().isfinite():
        raise NotFiniteError(told())


def told(*where: str) -> str:
    """The sentence for a user; ``where`` names step and layer."""
    found = ", ".join(("the model's logits are not finite numbers", *where))
    return f"{found}: its weights are damaged or overflow in this dtype; try --dtype float32"


def first_not_finite(model: Any, forward: Callable[[], Tensor]) -> str:
    """The first part of ``model`` whose output is not finite while ``forward()`` runs once more."""
    seen: list[str] = []

    def look(part: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not seen and isinstance(tensor, Tensor) and not tensor.isfinite().all():
                seen.append(part)

        return hook

    hooks = [module.register_forward_hook(look(part)) for part, module in _parts(model)]
    try:
        bad = not forward().max().isfinite()
    finally:
        for hook in hooks:
            hook.remove()
    if seen:
        return f"first in {seen[0]}"
    return "first in the output layer" if bad else "though not without the cache"


def _parts(model: Any) -> list[tuple[str, nn.Module]]:
    """The embedding and the layers, in order."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
    stack = next(lists, torch.nn.ModuleList())
    parts = [(f"layer {index}", layer) for index, layer in enumerate(stack)]
    return [("the embedding", model.get_input_embeddings()), *parts]
