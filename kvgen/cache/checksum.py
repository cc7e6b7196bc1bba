"""Checksums of tensors, on all processors. Imports torch once there are tensors.

CRC-32 as zlib computes it: it finds every error of up to four bytes in a row, and runs at several
gigabytes per second and processor.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def bytes_of(tensor: Tensor) -> Any:
    """A tensor's bytes in order, as an array; a copy only where they do not lie so."""
    import torch

    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy()


def checksums(pieces: Iterable[Any]) -> list[int]:
    """CRC-32 of each tensor or piece of bytes."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # zlib frees the interpreter
        return list(pool.map(_checksum, pieces))


def _checksum(piece: Any) -> int:
    return zlib.crc32(bytes_of(piece) if hasattr(piece, "detach") else piece)
