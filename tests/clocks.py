"""Clocks for tests: time passes only where a test says so."""

from __future__ import annotations


class FakeClock:
    """Stands still until ``pass_`` moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def pass_(self, seconds: float) -> None:
        self.time += seconds
