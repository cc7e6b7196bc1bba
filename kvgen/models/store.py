"""The user's cache of converted models: locks and atomic publishing.

Imports filelock, nothing of torch or transformers.

Layout, under KVGEN_CACHE_DIR or the system's per-user cache folder::

    gguf/hashes.json            file path, size and times -> content hash, to skip re-hashing
    gguf/<sha256>-v<N>/         a complete conversion; present means complete
    gguf/<sha256>-v<N>.lock     held while converting
    gguf/<sha256>-v<N>.tmp-*/   a conversion under way, or left by a killed process
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvgen.models.types import ProgressCallback, no_progress
from kvgen.storage import cache_root, make_private, recall, remember

CONVERTER_VERSION = 1  # raise it when converted folders change, so that old ones are not used
MANIFEST = "kvgen.json"
_TEMPORARY = ".tmp-"

logger = logging.getLogger("kvgen")


def find_converted(sha256: str) -> Path | None:
    """The complete conversion of the GGUF file with this content hash, if there is one."""
    folder = _folder(sha256)
    return folder if _is_complete(folder) else None


def find_converted_before(path: Path) -> Path | None:
    """The same for a file whose content hash is remembered, without reading it."""
    try:
        sha256 = _remembered_hash(path)
    except OSError:
        return None
    return None if sha256 is None else find_converted(sha256)


def publish(
    sha256: str,
    write: Callable[[Path], None],
    progress: ProgressCallback = no_progress,
) -> Path:
    """The converted folder for ``sha256``, made with ``write(folder)`` if it is not there yet.

    However many processes ask at once, one writes and the others wait for it. Readers see the
    whole folder or none: it is written beside its place, flushed, and renamed. Raises OSError when
    the cache cannot be written, and whatever ``write`` raises; neither leaves anything behind.
    """
    from filelock import FileLock, Timeout

    folder = _folder(sha256)
    make_private(folder.parent)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another kvgen to convert this model", 0, 0)
        lock.acquire()
    try:
        if _is_complete(folder):
            return folder
        _remove_abandoned(folder.parent, own=folder)
        _write_then_rename(folder, write)
    finally:
        lock.release()
    return folder


def write_manifest(folder: Path) -> None:
    """Record the size of every file in the folder, so that damage shows later."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    manifest = {"converter": CONVERTER_VERSION, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def content_hash(path: Path) -> str:
    """SHA-256 of a file's content, remembered by its path, size and times."""
    remembered = _remembered_hash(path)
    if remembered is not None:
        return remembered
    stamp = _stamp(path)
    digest = _hash_file(path)
    entry = {"stamp": stamp, "sha256": digest}
    remember(_index(), recall(_index()) | {str(path.resolve()): entry})
    return digest


def _remembered_hash(path: Path) -> str | None:
    entry = recall(_index()).get(str(path.resolve()))
    if isinstance(entry, dict) and entry.get("stamp") == _stamp(path):
        sha256 = entry.get("sha256")
        return str(sha256) if _is_hash(sha256) else None
    return None


def _index() -> Path:
    return cache_root() / "gguf" / "hashes.json"


def _stamp(path: Path) -> list[int]:
    # The change time is part of it because a replaced file can carry its old modified time.
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _folder(sha256: str) -> Path:
    return cache_root() / "gguf" / f"{sha256}-v{CONVERTER_VERSION}"


def _is_complete(folder: Path) -> bool:
    """Whether every file the manifest names is there with its size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_then_rename(folder: Path, write: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=folder.name + _TEMPORARY, dir=folder.parent))
    try:
        write(temporary)
        write_manifest(temporary)
        for file in temporary.iterdir():
            _flush(file)
        if folder.exists():  # damaged: it would have been used otherwise
            shutil.rmtree(folder)
        os.replace(temporary, folder)
        _flush_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(parent: Path, own: Path) -> None:
    """Delete conversions that a killed process left; called while holding ``own``'s lock."""
    from filelock import FileLock, Timeout

    for temporary in parent.glob(f"*{_TEMPORARY}*"):
        key = temporary.name.partition(_TEMPORARY)[0]
        if key == own.name:  # only the holder of our lock writes these, and that is us
            shutil.rmtree(temporary, ignore_errors=True)
            continue
        try:
            with FileLock(parent / f"{key}.lock", timeout=0):
                shutil.rmtree(temporary, ignore_errors=True)
        except (OSError, Timeout):
            continue  # somebody is writing it


def _flush(file: Path) -> None:
    """Have the system write a file to disk, so that the rename cannot outrun its content."""
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())


def _flush_folder(folder: Path) -> None:
    """The same for a folder's entries, on the systems that can open one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        logger.debug("cannot flush %s: %s", folder, error)
    finally:
        os.close(descriptor)


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_hash(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
