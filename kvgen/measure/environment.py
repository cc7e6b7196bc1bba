"""Where a measurement was made: everything a reader needs to judge or repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvgen
from kvgen.measure.records import Environment


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


def usable_cores() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy(where: Environment) -> str | None:
    """A warning when other work ran beside the measuring, or ``None``."""
    if where.load_average is None or where.load_average <= where.cores:
        return None
    return (
        f"load average {where.load_average:.1f} on {where.cores} cores: other work ran beside "
        "this, so do not trust the times"
    )


def kvgen_revision() -> str | None:
    """The git commit kvgen runs from, ``+`` added for uncommitted changes; ``None`` elsewhere."""
    root = Path(kvgen.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git(root, "status", "--porcelain", "--", "kvgen") else "")


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or ``None`` when it is not there or fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(attention: str, device: Any, dtype: str, bandwidth: float | None) -> Environment:
    """The environment of a run; ``bandwidth`` in bytes per second, ``attention`` by name."""
    import torch

    return Environment(
        kvgen=kvgen.__version__,
        kvgen_revision=kvgen_revision(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
        platform=f"{platform.system()} {platform.machine()} ({sys.platform})",
        cpu=cpu_name(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        load_average=load_average(),
        device=str(device),
        dtype=dtype,
        attention=attention,
        bandwidth_bytes_per_s=bandwidth,
    )
