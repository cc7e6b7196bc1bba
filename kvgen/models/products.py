"""How a linear layer multiplies a single row, the bulk of a decode step on a CPU: chosen by timing.

The library's product reads a matrix of weights at half the speed of memory and less when it has
one row to multiply (docs/performance.md). The same product taken in blocks of the matrix's rows,
where they lie, can be much faster, and so can one over a weight packed for the purpose; where,
depends on the processor, its arithmetic library, the dtype and the shape. All are timed once and
the fastest is remembered. Imports torch inside the functions.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
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
WHOLE, BLOCKS, PACKED = "whole", "blocks", "packed"
_LEAST_BYTES = 128 * 1024  # of a matrix that is worth a choice
_TIMED_BYTES = 256 * 1024 * 1024  # read at least, where a model has them, to leave any cache behind
_ROUNDS = 3
_GAIN = 0.9  # of the time of the simpler product; less is not told from chance
_FILE = "products.json"


class OneRowProducts(AbstractContextManager[None]):
    """Within its ``with`` block, the linear layers of ``model`` that ``chosen`` says multiply one
    row in blocks; ``chosen`` is what ``choose_products`` gave.
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
    """The fastest product for each shape of linear layer in ``model``, such as "576x1536 float32":
    whole as the library takes it, in blocks, or over packed weights.

    Timed where ``folder`` does not remember it, and remembered there unless other work ran beside
    it. Layers to be packed are, one after another, so that no weight but one is ever held twice;
    the choice for others is for ``OneRowProducts``. Empty on a device that is no CPU.
    """
    import torch

    if model.device.type != "cpu":
        return {}
    shapes = _by_shape(model)
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    every = {} if folder is None else recall(folder / _FILE)
    known = every[machine] if isinstance(every.get(machine), dict) else {}
    missing = [shape for shape in shapes if known.get(shape) not in (WHOLE, BLOCKS, PACKED)]
    # Reading the models' code takes a moment, and is not asked for where nothing may be packed.
    packs = missing or PACKED in map(known.get, shapes)
    alone = _weights_of_their_own(model) if packs else set()
    with torch.no_grad():
        found = {shape: _fastest(shapes[shape], alone) for shape in missing}
    if found and folder is not None and not is_busy():
        remember(folder / _FILE, every | {machine: known | found})
    chosen = {shape: found.get(shape) or known[shape] for shape in shapes}
    for shape, layers in shapes.items():
        if chosen[shape] == PACKED:
            _pack(layers, alone)
    return chosen


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


def _weights_of_their_own(model: Any) -> set[Any]:
    """The layers whose weight may lie otherwise: tied to no other, and read by no other code."""
    every = model.named_parameters(remove_duplicate=False)
    users = Counter(weight.data_ptr() for _, weight in every)
    code = {kind: _source(kind) for kind in set(map(type, model.modules()))}
    found = set()
    for parent in model.modules():
        for name, layer in parent.named_children():
            weight = getattr(layer, "weight", None)
            if weight is not None and f"{name}.weight" not in code[type(parent)]:
                found |= {layer} if users[weight.data_ptr()] == 1 else set()
    return found


def _fastest(layers: list[Any], alone: set[Any]) -> str:
    """Which product takes ``layers`` of one shape the least time, which they end as they began."""
    import torch

    from kvgen.models.packed import unpack

    weight = layers[0].weight
    timed = layers[: -(-_TIMED_BYTES // weight.nbytes)]
    row = torch.ones(1, 1, weight.shape[1], dtype=weight.dtype)
    del weight  # which packing would else keep alive
    whole, blocks = _times(
        row, [layer.forward for layer in timed], [_in_blocks(layer) for layer in timed]
    )
    best, way = (blocks, BLOCKS) if blocks < _GAIN * whole else (whole, WHOLE)
    if not _pack(timed, alone):
        return way
    (packed,) = _times(row, [layer.forward for layer in timed])
    for layer in timed:
        unpack(layer)
    return PACKED if packed < _GAIN * best else way


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _pack(layers: list[Any], alone: set[Any]) -> bool:
    """Pack all layers or, where one of them cannot be, none; whether it was done."""
    from kvgen.models.packed import can_pack, pack

    if not alone.issuperset(layers) or not can_pack(layers[0]):
        return False
    for layer in layers:
        pack(layer)
    return True


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
