"""Where a measurement was made: everything a reader needs to judge or repeat it."""

from __future__ import annotations

import os
import platform
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


def environment(model: Any, device: Any, dtype: str, bandwidth: float | None) -> Environment:
    """The environment of a run of ``model``; ``bandwidth`` in bytes per second."""
    import torch

    return Environment(
        kvgen=kvgen.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
        platform=f"{platform.system()} {platform.machine()} ({sys.platform})",
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load_average=load_average(),
        device=str(device),
        dtype=dtype,
        attention=str(getattr(model.config, "_attn_implementation", "unknown")),
        bandwidth_bytes_per_s=bandwidth,
    )
