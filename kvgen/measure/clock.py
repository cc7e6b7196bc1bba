"""Time. One monotonic clock that waits for the device before it is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """Anything that tells seconds from a fixed, arbitrary start."""

    def now(self) -> float:
        """Seconds, monotonic, with all work issued so far finished."""


class DeviceClock:
    """The machine's monotonic clock, read after the device has finished its queue."""

    def __init__(self, device: Any) -> None:
        """``device`` is a ``torch.device``."""
        self._wait = _synchroniser(device)

    def now(self) -> float:
        """Seconds, monotonic."""
        self._wait()
        return time.perf_counter()


def _synchroniser(device: Any) -> Callable[[], None]:
    import torch

    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize  # type: ignore[no-any-return]
    return lambda: None
