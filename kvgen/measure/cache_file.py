"""What a cache file holds, as a record. No torch: nothing is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from kvgen.cache.disk import open_cache_file


@dataclass
class FileFacts:
    """What a cache file says of itself; sizes are those of the file and of what lies in it."""

    path: str
    model: str
    tokens: int
    bytes: int
    layers: dict[str, tuple[int, int]]
    """By kind: how many layers there are, and the bytes stored for them together."""
    snapshot: bool
    seconds: float | None
    """What forwarding all tokens took."""
    fingerprint: dict[str, str]


def describe_file(path: Path) -> FileFacts:
    """Read a file's header. Raises ``CacheFileError`` for what is no cache file."""
    file = open_cache_file(path)
    header = file.header
    layers: dict[str, tuple[int, int]] = {}
    for kind, held in zip(header.layers, file.layer_bytes(), strict=True):
        count, total = layers.get(kind, (0, 0))
        layers[kind] = count + 1, total + held
    return FileFacts(
        str(path),
        header.model,
        len(file.ids),
        file.bytes,
        layers,
        header.snapshot,
        header.seconds,
        asdict(header.fingerprint),
    )
