"""How a linear layer multiplies a single row, the bulk of a decode step on a CPU: chosen by timing.

The library's product reads a matrix of weights at half the speed of memory and less when it has
one row to multiply (docs/performance.md). The same product taken in blocks of the matrix's rows,
where they lie, can be much faster, and so can torch's own product in 16 bits; where, depends on the
processor, its arithmetic libraries, the dtype and the shape. All are timed once and the fastest is
remembered. No weight is moved or copied. Imports torch inside the functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.machine import cpu_name, is_busy
from kvgen.storage import recall, remember

if TYPE_CHECKING:
    from torch import Tensor

Product = Callable[["Tensor"], "Tensor"]
WHOLE, BLOCKS, GEMV = "whole", "blocks", "gemv"
_LEAST_BYTES = 128 * 1024  # of a matrix that is worth a choice
_TIMED_BYTES = 256 * 1024 * 1024  # read at least, where a model has them, to leave any cache behind
_ROUNDS = 3
_GAIN = 0.9  # of the time of the simpler product; less is not told from chance
_FILE = "products.json"


class OneRowProducts(AbstractContextManager[None]):
    """Within its ``with`` block, the linear layers of ``model`` multiply one row as ``chosen``
    says, which is what ``choose_products`` gave.
    """

    def __init__(self, model: Any, chosen: Mapping[str, str]) -> None:
        self._layers = [
            (vars(layer), _WAYS[chosen[shape]](layer))
            for shape, layers in _by_shape(model).items()
            for layer in layers
            if chosen.get(shape, WHOLE) != WHOLE
        ]

    def __enter__(self) -> None:
        for attributes, forward in self._layers:
            attributes["forward"] = forward

    def __exit__(self, *error: object) -> None:
        for attributes, _ in self._layers:
            del attributes["forward"]


def choose_products(model: Any, folder: Path | None) -> dict[str, str]:
    """The fastest product for each shape of linear layer in ``model``, such as "576x1536 float32":
    whole as the library takes it, in blocks, or gemv, torch's own.

    Timed where ``folder`` does not remember it, and remembered there unless other work ran beside
    it. Empty on a device that is no CPU.
    """
    import torch

    if model.device.type != "cpu":
        return {}
    shapes = _by_shape(model)
    threads = f"{torch.get_num_threads()} threads"
    # A choice among fewer ways, by an earlier release, is none.
    setting = ", ".join((cpu_name(), threads, f"torch {torch.__version__}", WHOLE, *_WAYS))
    every = {} if folder is None else recall(folder / _FILE)
    known = every[setting] if isinstance(every.get(setting), dict) else {}
    with torch.no_grad():
        found = {
            shape: _fastest(layers)
            for shape, layers in shapes.items()
            if known.get(shape) not in (WHOLE, *_WAYS)
        }
    if found and folder is not None and not is_busy():
        remember(folder / _FILE, every | {setting: known | found})
    return {shape: found.get(shape) or known[shape] for shape in shapes}


def _by_shape(model: Any) -> dict[str, list[Any]]:
    """The plain linear layers that can multiply in blocks, the large ones."""
    import torch

    shapes: dict[str, list[Any]] = {}
    for layer in model.modules():
        if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
            continue
        weight = layer.weight
        # Shares of a weight, and weights that wait elsewhere, are the business of those who moved
        # them.
        if type(weight) is not torch.nn.Parameter or weight.device.type != "cpu":
            continue
        if weight.nbytes >= _LEAST_BYTES and weight.is_contiguous() and weight.shape[0] % 2 == 0:
            dtype = str(weight.dtype).removeprefix("torch.")
            shapes.setdefault(f"{weight.shape[0]}x{weight.shape[1]} {dtype}", []).append(layer)
    return shapes


def _fastest(layers: list[Any]) -> str:
    """Which product takes ``layers`` of one shape the least time."""
    import torch

    weight = layers[0].weight
    timed = layers[: -(-_TIMED_BYTES // weight.nbytes)]
    row = torch.ones(1, 1, weight.shape[1], dtype=weight.dtype)
    names = [BLOCKS, GEMV] if weight.element_size() == 2 and _uses_onednn() else [BLOCKS]
    ways = [[layer.forward for layer in timed]]
    ways += [[_WAYS[name](layer) for layer in timed] for name in names]
    whole, *others = _times(row, *ways)
    best, name = min(zip(others, names, strict=True))
    return name if best < _GAIN * whole else WHOLE


def _times(row: Tensor, *ways: list[Product]) -> list[float]:
    """Seconds that each way's products with ``row`` take: the best of a few rounds, in turn."""
    best = [float("inf")] * len(ways)
    for _ in range(_ROUNDS):
        for way, products in enumerate(ways):
            begin = time.perf_counter()
            for product in products:
                product(row)
            best[way] = min(best[way], time.perf_counter() - begin)
    return best


def _in_blocks(layer: Any) -> Product:
    """A forward of ``layer`` that takes one row in blocks and several as ever."""
    import torch

    blocks, outputs = 2, layer.out_features
    while blocks < max(8, torch.get_num_threads()) and outputs % (2 * blocks) == 0:
        blocks *= 2
    matrices = layer.weight.view(blocks, outputs // blocks, layer.in_features)
    return partial(_product, matrices, layer.bias, torch.bmm, layer.forward)


def _product(
    matrices: Tensor,
    bias: Tensor | None,
    bmm: Callable[[Tensor, Tensor], Tensor],
    whole: Product,
    rows: Tensor,
) -> Tensor:
    """``rows`` ``[..., inputs]`` times the transpose of ``matrices`` ``[blocks, part, inputs]``."""
    blocks, part, inputs = matrices.shape
    if rows.numel() != inputs or not rows.is_contiguous():
        return whole(rows)
    # Every block multiplies the same column. It is a row seen upright, for with other strides
    # MKL takes a route that is five times slower.
    columns = rows.as_strided((blocks, inputs, 1), (0, 1, inputs))
    product = bmm(matrices, columns).view(*rows.shape[:-1], blocks * part)
    return product if bias is None else product + bias


def _uses_onednn() -> bool:
    import torch

    return bool(torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled())


def _as_gemv(layer: Any) -> Product:
    """A forward of ``layer`` that takes one row by torch's own product and several as ever."""
    import torch

    return partial(_without_onednn, layer.in_features, torch._C._set_mkldnn_enabled, layer.forward)


def _without_onednn(
    inputs: int, enable: Callable[[bool], None], whole: Product, rows: Tensor
) -> Tensor:
    """oneDNN brings a matrix of 16 bits into an order of its own, anew at every product; torch
    reads it where it lies.
    """
    if rows.numel() != inputs:
        return whole(rows)
    enable(False)
    try:
        return whole(rows)
    finally:
        enable(True)


_WAYS: dict[str, Callable[[Any], Product]] = {BLOCKS: _in_blocks, GEMV: _as_gemv}
