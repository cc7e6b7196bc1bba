"""Time. One monotonic clock that waits for the device before it is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from kvgen.models.ranks import Ranks, current


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


class RanksClock:
    """Rank 0's clock, read by all ranks at once. Each reading is where they may be stopped."""

    def __init__(self, clock: Clock, ranks: Ranks) -> None:
        """From here on signals wait for the next reading."""
        self._clock, self._ranks = clock, ranks
        ranks.lockstep = True
        self.now()  # or the first reading would count the wait for the slowest to come

    def now(self) -> float:
        """Seconds, monotonic. Raises ``KeyboardInterrupt`` if any rank was told to stop."""
        return self._ranks.tick(self._clock.now())


def clock_for(device: Any) -> Clock:
    """The clock of a run on ``device``."""
    ranks = current()
    clock = DeviceClock(device)
    return clock if ranks is None else RanksClock(clock, ranks)


def _synchroniser(device: Any) -> Callable[[], None]:
    import torch

    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize  # type: ignore[no-any-return]
    return lambda: None
