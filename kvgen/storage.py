"""Files that kvgen keeps for a user: where they lie and how they are written. No torch.

A file is either the old one or the new one, whole, whatever happens while it is written.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger("kvgen")

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


def is_device(path: Path) -> bool:
    """Whether ``path`` is there but is no file or folder: a device, a named pipe, /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text or bytes so that ``path`` is never seen half-written. Raises ``OSError``.

    A file that is replaced keeps its permissions. A link stays one: what it points at is replaced.
    A device or a named pipe is written to, as nothing may take its place.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if is_device(path):
        path.write_bytes(data)
    else:
        replace_atomically(path, lambda file: file.write(data))


def recall(file: Path) -> dict[str, Any]:
    """What ``remember`` left there; empty where there is nothing, or nothing that can be read."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def remember(file: Path, content: dict[str, Any]) -> None:
    """Write what only saves work later: where that is not possible, it is done again."""
    try:
        make_private(file.parent)
        write_atomically(file, json.dumps(content, indent=1))
    except OSError as error:
        logger.debug("cannot write %s: %s", file, error)


def replace_atomically(
    path: Path, write: Callable[[BinaryIO], object], private: bool = False
) -> None:
    """As ``write_atomically``, of what ``write`` writes piece by piece into the file it is given.

    A ``private`` file that was not there before is for this user only.
    """
    path = path.resolve()
    temporary = path.with_name(f".kvgen-{secrets.token_hex(8)}")
    mode = 0o600 if private else 0o666
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
