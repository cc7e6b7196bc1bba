"""How a linear layer multiplies a single row, the bulk of a decode step on a CPU: chosen by timing.

The library's product reads a matrix of weights at half the speed of memory and less when it has
one row to multiply (docs/performance.md). The same product taken in blocks of the matrix's rows
can be much faster; where, depends on the processor, its arithmetic library and the shape. Both are
timed once and the faster is remembered. The weights stay as they are, and where they are. Imports
torch inside the functions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.machine import cpu_name, is_busy
from kvgen.storage import make_private, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

WHOLE, BLOCKS = "whole", "blocks"
_LEAST_BYTES = 128 * 1024  # of a matrix that is worth a choice
_TIMED_BYTES = 256 * 1024 * 1024  # read at least, where a model has them, to leave any cache behind
_ROUNDS = 3
_GAIN = 0.9  # of the time of the whole product; less is not told from chance
_FILE = "products.json"


class OneRowProducts(AbstractContextManager[None]):
    """Within its ``with`` block, linear layers of ``model`` multiply one row as ``chosen`` says.

    ``chosen`` maps shapes, as ``choose_products`` names them, to "whole" or "blocks".
    """

    def __init__(self, model: Any, chosen: Mapping[str, str]) -> None:
        self._layers = [
            (vars(layer), _in_blocks(layer))
            for shape, layers in _by_shape(model).items()
            for layer in layers
            if chosen.get(shape) == BLOCKS
        ]

    def __enter__(self) -> None:
        for attributes, forward in self._layers:
            attributes["forward"] = forward

    def __exit__(self, *error: object) -> None:
        for attributes, _ in self._layers:
            del attributes["forward"]


def choose_products(model: Any, folder: Path | None) -> dict[str, str]:
    """The faster product for each shape of linear layer in ``model``, such as "576x1536 float32".

    Timed where ``folder`` does not remember it, and remembered there unless other work ran beside
    it. Empty where there is nothing to choose, as on a device that is no CPU.
    """
    import torch

    if model.device.type != "cpu":
        return {}
    shapes = _by_shape(model)
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    every = _remembered(folder)
    known = every.setdefault(machine, {})
    missing = [shape for shape in shapes if known.get(shape) not in (WHOLE, BLOCKS)]
    with torch.inference_mode():
        found = {shape: _faster(shapes[shape]) for shape in missing}
    if found and folder is not None and not is_busy():
        known.update(found)
        try:
            make_private(folder)
            write_atomically(folder / _FILE, json.dumps(every, indent=1))
        except OSError:
            pass  # timed again next time
    return {shape: found.get(shape) or known[shape] for shape in shapes}


def _by_shape(model: Any) -> dict[str, list[Any]]:
    """The plain linear layers that can multiply in blocks, the large ones."""
    import torch

    shapes: dict[str, list[Any]] = {}
    for layer in model.modules():
        if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
            continue
        weight = layer.weight
        if weight.nbytes >= _LEAST_BYTES and weight.is_contiguous() and weight.shape[0] % 2 == 0:
            dtype = str(weight.dtype).removeprefix("torch.")
            shapes.setdefault(f"{weight.shape[0]}x{weight.shape[1]} {dtype}", []).append(layer)
    return shapes


def _faster(layers: list[Any]) -> str:
    """Which product takes ``layers`` of one shape less time: the best of a few rounds, in turn."""
    import torch

    enough = -(-_TIMED_BYTES // layers[0].weight.nbytes)
    timed = layers[:enough]
    row = torch.ones(1, 1, timed[0].in_features, dtype=timed[0].weight.dtype)
    ways: dict[str, list[Callable[[Tensor], Tensor]]] = {
        WHOLE: [layer.forward for layer in timed],
        BLOCKS: [_in_blocks(layer) for layer in timed],
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(_ROUNDS):
        for way, products in ways.items():
            begin = time.perf_counter()
            for product in products:
                product(row)
            best[way] = min(best[way], time.perf_counter() - begin)
    return BLOCKS if best[BLOCKS] < _GAIN * best[WHOLE] else WHOLE


def _in_blocks(layer: Any) -> Callable[[Tensor], Tensor]:
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
    whole: Callable[[Tensor], Tensor],
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


def _remembered(folder: Path | None) -> dict[str, dict[str, str]]:
    if folder is None:
        return {}
    try:
        found = json.loads((folder / _FILE).read_text("utf-8"))
        return {machine: dict(shapes) for machine, shapes in found.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return {}
