"""Chooses device and dtype. Imports kvgen.errors; torch inside the functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.errors import UsageError

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")


def check_dtype_name(name: str) -> None:
    """Raise UsageError unless ``name`` is one of DTYPE_NAMES."""
    if name not in DTYPE_NAMES:
        raise UsageError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPE_NAMES)}")


def choose_device(name: str) -> torch.device:
    """The device called ``name``; "auto" takes CUDA, then MPS, then the CPU.

    Raises UsageError when the name means nothing or this machine lacks the device.
    """
    import torch

    available = _available_devices()
    if name == "auto":
        return torch.device(available[0])
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (colon and not (kind == "cuda" and index.isdecimal())):
        raise UsageError(f"unknown device {name!r}; choose auto, cpu, cuda, cuda:N or mps")
    if name not in available:
        raise UsageError(
            f"device {name!r} is not available here; available: {', '.join(available)}"
        )
    return torch.device(name)


def choose_dtype(name: str, checkpoint: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype to run in: the named one, or for "auto" the checkpoint's.

    A float16 checkpoint runs in float32 on the CPU, where half-precision arithmetic is slow.
    """
    import torch

    if name != "auto":
        return getattr(torch, name)
    chosen = checkpoint if checkpoint is not None else torch.float32
    if chosen == torch.float16 and device.type == "cpu":
        return torch.float32
    return chosen


def _available_devices() -> list[str]:
    """Names that ``choose_device`` accepts on this machine, the fastest first."""
    import torch

    devices: list[str] = []
    if torch.cuda.is_available():
        devices += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return [*devices, "cpu"]
