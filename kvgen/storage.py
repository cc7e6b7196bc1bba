"""Files that kvgen keeps for a user: where they lie and how they are written. No torch.

A file is either the old one or the new one, whole, whatever happens while it is written.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

ENVIRONMENT_VARIABLE = "KVGEN_CACHE_DIR"


def cache_root() -> Path:
    """The user's cache folder for kvgen. It may not exist yet."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("kvgen", appauthor=False)


def make_private(folder: Path) -> None:
    """Create the folder and its missing parents for this user only. Raises ``OSError``."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text or bytes so that ``path`` is never seen half-written. Raises ``OSError``.

    A new file may be read by whom the user's umask says, an old one by whom it was before.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.chmod(name, _mode(path))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0o077)  # it can be read by setting it only
        os.umask(mask)
        return 0o666 & ~mask
