"""What this process may use of the machine it runs on. Imports nothing of kvgen; no torch."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def load_average() -> float | None:
    """Processes waiting to run, averaged over a minute; ``None`` where the system has no word."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def is_busy() -> bool:
    """Whether so much other work runs that what is timed now should not be remembered."""
    return (load_average() or 0.0) > usable_cores() / 2


def usable_cores(root: Path = _ROOT) -> int:
    """Processors this process may run on: its affinity, and a container's quota rounded up."""
    quota = _quota(root)
    allowed = len(_affinity())
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def default_threads(root: Path = _ROOT) -> int:
    """Threads that one operation should be split over: physical cores, and no more than a quota.

    A second thread on a core adds nothing to reading memory. A quota is rounded down, because
    threads that wait for each other all stand still while one of them is held back.
    """
    quota = _quota(root)
    cores = _physical_cores(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(root: Path) -> int:
    """Cores of the processors allowed, those that share a core counted once."""
    cores = set()
    for number in _affinity():
        path = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        cores.add(_text(path) or str(number))
    return len(cores)


def _quota(root: Path) -> float | None:
    """Processors' worth of time that control groups allow; ``None`` without a limit.

    The tightest of the process's own group and all above it, in version 2 or 1 of the interface.
    """
    found = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            folders = _upward(root / "sys/fs/cgroup", group)
            found += [_share(*(_text(f / "cpu.max") or "max").split()) for f in folders]
        elif "cpu" in controllers.split(","):
            for folder in _upward(root / "sys/fs/cgroup/cpu", group):
                limits = [_text(folder / f"cpu.cfs_{one}_us") for one in ("quota", "period")]
                found.append(_share(*(text or "-1" for text in limits)))
    return min((share for share in found if share is not None), default=None)


def _upward(base: Path, group: str) -> Iterator[Path]:
    """The folder of a group and those above it; in a container the path may not be there."""
    folder = base / group.strip("/")
    yield from (one for one in (folder, *folder.parents) if one.is_relative_to(base))


def _share(quota: str, period: str = "100000") -> float | None:
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return share if share > 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return None
