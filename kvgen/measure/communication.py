"""What of a step goes to communication between ranks: time in collectives, and bytes on the wire.

torch has no account of it, so the collectives that a divided model calls are replaced by ones that
take note and then do the same. Imports torch.

A ring, which both gloo and NCCL use for what is large, makes every rank send 2 (n - 1) / n times
the bytes of an all-reduce, and n - 1 times its own part of an all-gather (Thakur, Rabenseifner and
Gropp, 2005, sections 4.1 and 4.5). That is what ``wire_bytes`` counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kvgen.models.ranks import current


class Spent(NamedTuple):
    """What collectives took since it was asked last."""

    seconds: float
    calls: int
    wire_bytes: int


_REDUCE, _GATHER = "reduce", "gather"
# Where it is called from, what it does, and which argument is this rank's own.
_COLLECTIVES = (
    ("torch.distributed", "all_reduce", _REDUCE, 0),
    ("torch.distributed", "all_gather", _GATHER, 1),
    ("torch.distributed", "all_gather_into_tensor", _GATHER, 1),
    ("torch.distributed._functional_collectives", "all_reduce", _REDUCE, 0),
    ("torch.distributed._functional_collectives", "all_gather_single", _GATHER, 0),
    ("torch.distributed._functional_collectives", "all_gather_tensor", _GATHER, 0),
)


class Traffic:
    """Takes note of every collective from now on; kvgen's own between ranks are not among them."""

    def __init__(self, size: int) -> None:
        """``size`` is the number of ranks."""
        self._size = size
        self._seconds, self._calls, self._wire_bytes = 0.0, 0, 0
        self._events: list[tuple[Any, Any]] = []
        self._inside = False
        for module_name, name, kind, own in _COLLECTIVES:
            module = import_module(module_name)
            if hasattr(module, name):
                setattr(module, name, self._noting(getattr(module, name), kind, own))

    def take(self) -> Spent:
        """What there was since the last time; the device has finished by now."""
        waited = sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        spent = Spent(self._seconds + waited, self._calls, self._wire_bytes)
        self._seconds, self._calls, self._wire_bytes = 0.0, 0, 0
        self._events = []
        return spent

    def _noting(self, collective: Callable[..., Any], kind: str, own: int) -> Callable[..., Any]:
        def noted(*arguments: Any, **settings: Any) -> Any:
            if self._inside:  # one that is made of others
                return collective(*arguments, **settings)
            tensor = arguments[own] if len(arguments) > own else settings["tensor"]
            size = tensor.nbytes
            self._calls += 1
            self._wire_bytes += (self._size - 1) * (
                2 * size // self._size if kind == _REDUCE else size
            )
            self._inside = True
            try:
                return self._timed(tensor.is_cuda, lambda: collective(*arguments, **settings))
            finally:
                self._inside = False

        return noted

    def _timed(self, on_cuda: bool, run: Callable[[], Any]) -> Any:
        if on_cuda:  # the host runs ahead of the device
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = _waited_for(run())
            end.record()
            self._events.append((begin, end))
            return result
        began = time.perf_counter()
        result = _waited_for(run())
        self._seconds += time.perf_counter() - began
        return result


def _waited_for(result: Any) -> Any:
    """A functional collective's result, there now rather than when it is first read."""
    return result.wait() if hasattr(result, "wait") else result


def watch_traffic() -> Traffic | None:
    """Begin to take note, where there are ranks."""
    ranks = current()
    return Traffic(ranks.size) if ranks is not None and dist.is_initialized() else None
