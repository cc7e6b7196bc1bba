"""A linear layer whose weight lies in the order in which oneDNN, torch's CPU library, reads it.

In 16 bits the library otherwise brings a matrix into that order anew at every product. Nothing is
rounded, and nothing is kept twice: the packed weight takes the place of the plain one. Imports
torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PackedLinear(nn.Linear):  # type: ignore[misc]  # torch is read without its types
    """An ``nn.Linear`` turned in place by ``pack``; ``unpack`` turns it back."""

    packed: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight ``[outputs, inputs]`` as ever, a copy made at each call."""
        return self.packed.to_dense()

    def forward(self, rows: Tensor) -> Tensor:
        """``rows`` ``[..., inputs]`` times the weight, plus the bias if there is one."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self.packed, self.bias, "none", [], ""
        )
        return product


def can_pack(layer: Any) -> bool:
    """Whether this torch packs such a weight and the packed one gives the same product."""
    weight = layer.weight
    rows = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype).expand(2, -1)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, 1)
        product = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        same = torch.equal(packed.to_dense(), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    wanted = nn.functional.linear(rows, weight)
    return same and bool(torch.allclose(product, wanted, rtol=0.02, atol=0.02))


def pack(layer: Any) -> None:
    """Turn a plain ``nn.Linear`` into a ``PackedLinear`` in place."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, 1)
    del layer.weight
    layer.register_buffer("packed", packed, persistent=False)
    layer.__class__ = PackedLinear


def unpack(layer: Any) -> None:
    """Turn a ``PackedLinear`` into the plain ``nn.Linear`` it was."""
    weight = nn.Parameter(layer.packed.to_dense(), requires_grad=False)
    del layer.packed
    layer.__class__ = nn.Linear
    layer.weight = weight


def weights(model: Any) -> dict[str, Tensor]:
    """Every weight of ``model`` by name, the packed ones among them."""
    packed = {name: buffer for name, buffer in model.named_buffers() if buffer.is_mkldnn}
    return dict(model.named_parameters()) | packed
