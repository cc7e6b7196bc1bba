"""Files that kvgen keeps for a user: where they lie and how they are written. No torch.

A file is either the old one or the new one, whole, whatever happens while it is written.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """The user's cache directory for kvgen; ``KVGEN_CACHE_DIR`` overrides it."""
    chosen = os.environ.get("KVGEN_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else user_cache_path("kvgen")


def private_folder(path: Path) -> Path:
    """``path``, made if missing, readable by its owner alone. Raises ``OSError``."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_atomically(path: Path, content: str) -> None:
    """Write text so that ``path`` is never seen half-written. Raises ``OSError``."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
