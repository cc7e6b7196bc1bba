"""A cache written to a file and read back: the layers' states through the file format.

Knows the cache and the format, nothing of models or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgen.cache.disk import CacheFile, CacheFileError, Header, open_cache_file, write_cache_file
from kvgen.cache.fingerprint import Fingerprint
from kvgen.cache.manager import KVCache
from kvgen.cache.state import State


def save_cache(
    path: Path,
    cache: KVCache,
    ids: Sequence[int],
    fingerprint: Fingerprint,
    model: str = "",
    seconds: float | None = None,
    snapshot: bool = False,
    extra: dict[str, Any] | None = None,
) -> int:
    """Write ``cache``, which holds the tokens ``ids``; returns the file's bytes.

    The other arguments are those of ``Header``. Raises ``OSError``, and then a file that was there
    before is as it was; ``ValueError`` for a cache that does not hold ``ids``.
    """
    if cache.position != len(ids):
        raise ValueError(f"the cache holds {cache.position} tokens, not {len(ids)}")
    kinds = [spec.kind for spec in cache.specs]
    header = Header(fingerprint, model, kinds, {}, seconds, snapshot, extra or {})
    return write_cache_file(path, header, ids, cache.state())


def open_for(path: Path, fingerprint: Fingerprint) -> CacheFile:
    """Open a cache file that is to serve what ``fingerprint`` describes.

    Raises ``CacheFileError`` for a file that is damaged, and for one that was made otherwise,
    naming every difference.
    """
    file = open_cache_file(path)
    file.require(fingerprint)
    return file


def load_cache(file: CacheFile, cache: KVCache, device: Any = "cpu") -> None:
    """Fill an empty ``cache`` of the same specs and policy from a file, every byte checked.

    On the CPU the cache goes on in the file's pages, which are its own copy as soon as it writes.
    Raises ``CacheFileError`` for damage, and for a state that does not fit the cache.
    """
    file.check()
    state = file.state()
    tensors = {name: tensor.to(device) for name, tensor in state.tensors.items()}
    try:
        cache.load(State(tensors, state.numbers))
        fits = cache.position == len(file.ids) and cache.drop_unfinished()
    except (KeyError, ValueError, IndexError, RuntimeError):
        fits = False
    if not fits:
        cache.reset()
        raise CacheFileError(
            f"{file.path} does not hold what the layers of this model keep; it was left as it is. "
            "Delete it, or choose another file"
        )
