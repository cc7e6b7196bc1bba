"""Where a measurement was made: everything a reader needs to judge or repeat it."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import kvgen
from kvgen.machine import cpu_name, load_average, usable_cores
from kvgen.measure.records import Environment

if TYPE_CHECKING:
    from kvgen.engine.forward import Forward
    from kvgen.models import LoadedModel


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


def environment(
    forward: Forward, loaded: LoadedModel, bandwidth: float | None = None
) -> Environment:
    """Of a run of ``loaded`` through ``forward``; ``bandwidth`` in bytes per second."""
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
        device=str(loaded.device),
        dtype=loaded.dtype_name,
        attention=forward.attention,
        products=dict(forward.products),
        bandwidth_bytes_per_s=bandwidth,
    )
