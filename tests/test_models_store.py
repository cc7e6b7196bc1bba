"""The conversion cache: private, atomic, one writer, nothing left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvgen.models import store
from kvgen.storage import cache_root

KEY = "0" * 64
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def write_one(folder: Path) -> None:
    (folder / "file").write_text("content")


def leftovers(cache: Path) -> list[str]:
    return [entry.name for entry in cache.iterdir() if ".tmp-" in entry.name]


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT)


def test_a_published_folder_is_found_and_private(cache: Path) -> None:
    assert store.find_converted(KEY) is None
    folder = store.publish(KEY, write_one)
    assert store.find_converted(KEY) == folder
    assert (folder / "file").read_text() == "content"
    if os.name == "posix":
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGEN_CACHE_DIR")
    assert "kvgen" in str(cache_root())


def test_publishing_again_writes_nothing() -> None:
    first = store.publish(KEY, write_one)
    assert store.publish(KEY, lambda folder: pytest.fail("written twice")) == first


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_folder_is_written_anew(damage: str) -> None:
    file = store.publish(KEY, write_one) / "file"
    if damage == "remove":
        file.unlink()
    else:
        file.write_text("con")
    assert store.find_converted(KEY) is None
    assert (store.publish(KEY, write_one) / "file").read_text() == "content"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_nothing(cache: Path, error: type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        write_one(folder)
        raise error

    with pytest.raises(error):
        store.publish(KEY, fail)
    assert leftovers(cache) == []
    assert store.find_converted(KEY) is None


def test_many_processes_at_once_write_once(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from kvgen.models import store
from kvgen.storage import cache_root
def write(folder):
    with open(sys.argv[1], "a") as log: log.write("written\\n")
    time.sleep(0.5)
    (folder / "file").write_text("content")
assert (store.publish("{KEY}", write) / "file").read_text() == "content"
"""
    log = tmp_path / "log"
    processes = [start(code, str(log)) for _ in range(8)]
    assert [process.wait(60) for process in processes] == [0] * 8
    assert log.read_text() == "written\n"


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")
@pytest.mark.parametrize("next_key", [KEY, "1" * 64])
def test_a_killed_write_is_cleaned_up_by_the_next(cache: Path, next_key: str) -> None:
    code = f"""
import time
from kvgen.models import store
from kvgen.storage import cache_root
def write(folder):
    (folder / "file").write_text("half")
    time.sleep(60)
store.publish("{KEY}", write)
"""
    process = start(code)
    deadline = time.monotonic() + 30
    while not (cache.is_dir() and list(cache.glob("*.tmp-*/file"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert len(leftovers(cache)) == 1
    assert store.find_converted(KEY) is None
    store.publish(next_key, write_one)
    assert leftovers(cache) == []


def test_a_running_write_is_not_cleaned_up_by_another(cache: Path) -> None:
    def outer(folder: Path) -> None:
        store.publish("1" * 64, write_one)
        assert folder.is_dir()
        write_one(folder)

    assert (store.publish(KEY, outer) / "file").is_file()


def test_a_hash_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    first = store.content_hash(file)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_hash_file", lambda path: pytest.fail("hashed again"))
        assert store.content_hash(file) == first
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    time.sleep(0.02)
    file.write_bytes(b"two")
    os.utime(file, ns=times)  # same size, same modified time, other content
    assert store.content_hash(file) != first


@pytest.mark.parametrize("index", ["", "[]", '{"x": 3}', "{not json"])
def test_a_damaged_hash_index_only_costs_a_hash(tmp_path: Path, cache: Path, index: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    expected = store.content_hash(file)
    (cache / "hashes.json").write_text(index)
    assert store.content_hash(file) == expected


def test_hashing_works_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(file / "below a file"))
    assert len(store.content_hash(file)) == 64
