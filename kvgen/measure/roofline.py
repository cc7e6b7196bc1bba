"""How near a step comes to the machine's limit: the bytes it must read, and how fast this machine
reads. A decode step cannot be faster than reading every weight and every stored pair once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import torch

from kvgen.machine import cpu_name, is_busy
from kvgen.measure.clock import DeviceClock
from kvgen.models.packed import weights
from kvgen.models.ranks import local, shared
from kvgen.storage import recall, remember

_PROBE_BYTES = 512 * 1024 * 1024
_PROBE_READS = 5
_FILE = "bandwidth.json"


class WeightReads:
    """Bytes of weights in a model, and how many of them one forward must read at least; of a model
    that is divided over ranks, this rank's.

    An input embedding of its own is read one row per token; one that is tied to the output is read
    whole. Of a mixture of experts only the chosen experts are read: at most ``tokens`` times the
    experts per token, out of all.
    """

    def __init__(self, model: Any) -> None:
        every = weights(model)
        parameters = _unique(map(local, every.values()))
        self.total = sum((parameters | _unique(map(local, model.buffers()))).values())
        table = local(model.get_input_embeddings().weight)
        output = model.get_output_embeddings()
        tied = output is not None and local(output.weight).data_ptr() == table.data_ptr()
        self._embedding = 0 if tied else parameters[table.data_ptr()]
        self._row = 0 if tied else table[0].numel() * table.element_size()
        config = model.config.get_text_config(decoder=True)
        experts, chosen = _first(config, _EXPERTS), _first(config, _CHOSEN)
        self._share_per_token = chosen / experts if experts and chosen else 1.0
        inside = [local(weight) for name, weight in every.items() if ".experts." in name]
        self._experts = sum(_unique(inside).values())

    def per_forward(self, tokens: int) -> int:
        """Bytes of weights that a forward over ``tokens`` tokens must read."""
        skipped_rows = max(0, self._embedding - tokens * self._row)
        skipped_experts = self._experts * (1 - min(1.0, tokens * self._share_per_token))
        return self.total - skipped_rows - int(skipped_experts)


# What configurations call the number of experts, and of those that each token is sent to.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _unique(tensors: Iterable[Any]) -> dict[int, int]:
    # Packed weights and those that wait on a disk have no address, and share no memory.
    return {
        id(t) if t.is_mkldnn else t.data_ptr() or id(t): t.numel() * t.element_size()
        for t in tensors
    }


def measured_bandwidth(device: Any, threads: int, folder: Path | None) -> float | None:
    """Bytes per second of large reads on ``device`` with ``threads`` threads.

    Measured once (a few hundred milliseconds) and remembered in ``folder``, unless other work ran
    beside it; ``None`` when memory for the probe cannot be had. Of several ranks the first one
    measures, so that they do not measure each other.
    """
    return shared(lambda: _measured_bandwidth(device, threads, folder))


def _measured_bandwidth(device: Any, threads: int, folder: Path | None) -> float | None:
    key = f"{_device_name(device)}, {threads} threads, torch {torch.__version__}"
    remembered = {} if folder is None else recall(folder / _FILE)
    if _is_speed(known := remembered.get(key)):
        return known
    try:
        found = _probe(device)
    except RuntimeError:  # out of memory, on any device
        return None
    if folder is not None and not is_busy():
        remember(folder / _FILE, remembered | {key: found})
    return found


def _probe(device: Any) -> float:
    """The best of several reads: others' load can only make a read slower."""
    block = torch.ones(_PROBE_BYTES // 4, device=device)
    clock, best = DeviceClock(device), float("inf")
    for _ in range(_PROBE_READS):
        begin = clock.now()
        block.sum().item()
        best = min(best, clock.now() - begin)
    return _PROBE_BYTES / best


def _is_speed(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and 0 < value < float("inf")


def _device_name(device: Any) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
