"""Cache files: what is refused, and by what name; what survives a full disk and a second writer."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reuse import holding

from kvgen.cache.disk import (
    CacheFileError,
    Header,
    open_cache_file,
    write_cache_file,
)
from kvgen.cache.fingerprint import Fingerprint
from kvgen.cache.manager import KVCache
from kvgen.cache.saving import load_cache, open_for, save_cache
from kvgen.cache.state import State

IDS = list(range(10, 30))
OWN = Fingerprint("float32", "c", "w", "t", "sdpa", "plain", "h")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kept.kv"
    save_cache(path, holding(IDS), IDS, OWN, "a model", 2.0, extra={"turns": [1, "two"]})
    return path


def loaded(path: Path) -> KVCache:
    cache = KVCache(holding([]).specs)
    load_cache(open_for(path, OWN), cache)
    return cache


def test_what_is_written_is_read_back_and_no_slack_with_it(file: Path) -> None:
    cache = loaded(file)
    assert cache.layers[0].pairs.views[0][0, 0, :, 0].int().tolist() == IDS
    opened = open_cache_file(file)
    assert opened.ids == IDS
    assert opened.header.extra == {"turns": [1, "two"]}
    assert (opened.header.seconds, opened.header.model) == (2.0, "a model")
    assert opened.layer_bytes() == [cache.bytes_used]
    # A little more than the pairs: the ids, the header and the checksums.
    assert file.stat().st_size < cache.bytes_used + 4 * len(IDS) + 2000


def test_a_file_is_private_and_one_that_is_replaced_keeps_its_permissions(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    save_cache(file, holding(IDS[:3]), IDS[:3], OWN)
    assert file.stat().st_mode & 0o777 == 0o640


def test_other_readers_of_safetensors_find_the_tensors(file: Path) -> None:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("token_ids").tolist() == IDS
        assert opened.get_tensor("layers.0.pairs.0").shape == (1, 1, len(IDS), 2)
        assert opened.metadata()["kvgen_cache_format"] == "1"


def test_tensors_of_any_dtype_come_back_bit_for_bit(tmp_path: Path) -> None:
    names = ("float32", "bfloat16", "float16", "uint8", "int64", "float64", "bool")
    tensors = {
        f"layers.{i}.{name}": torch.arange(7).to(getattr(torch, name))
        for i, name in enumerate(names)
    }
    path = tmp_path / "kept"
    write_cache_file(path, Header(OWN, "", ["x"] * len(names)), [], State(tensors))
    opened = open_cache_file(path)
    opened.check()
    back = opened.state().tensors
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert {name: t.dtype for name, t in back.items()} == {n: t.dtype for n, t in tensors.items()}


def test_writing_into_a_loaded_cache_leaves_its_file_alone(file: Path) -> None:
    before = file.read_bytes()
    cache = loaded(file)
    for view in cache.layers[0].pairs.views:
        view.zero_()
    assert file.read_bytes() == before


def test_every_flipped_byte_is_found(file: Path) -> None:
    good = file.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 0x10
        file.write_bytes(bad)
        with pytest.raises(CacheFileError, match=r"kept\.kv") as refusal:
            loaded(file)
        assert "\n" not in str(refusal.value)
        assert file.read_bytes() == bytes(bad)


@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, 1000, -33, -1])
def test_a_file_that_is_cut_short_is_refused(file: Path, left: int) -> None:
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CacheFileError, match="cut short"):
        open_cache_file(file)


def rewritten(file: Path, change: Any) -> None:
    """Change the header and make every checksum right again."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode().ljust(length)
    beginning = len(text).to_bytes(8, "little") + text
    rest = bytearray(content[8 + length :])
    size = table["checksums"]["shape"][0]
    rest[-size : len(rest) - size + 4] = zlib.crc32(beginning).to_bytes(4, "little")
    file.write_bytes(beginning + rest)


def test_a_file_of_a_later_format_is_refused_by_its_number(file: Path) -> None:
    rewritten(file, lambda table: table["__metadata__"].update(kvgen_cache_format="2"))
    with pytest.raises(CacheFileError, match="cache format '2', and this kvgen reads format 1"):
        open_cache_file(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table["layers.0.pairs.0"].update(dtype="F99"),
        lambda table: table["layers.0.pairs.0"].update(shape=[1, 1, 21, 2]),
        lambda table: table["layers.0.pairs.0"].update(shape=[-1, -1, 20, 2]),
        lambda table: table["layers.0.pairs.0"].update(data_offsets=[8, 168]),
        lambda table: table["layers.0.pairs.0"].update(data_offsets="x"),
        lambda table: table.pop("token_ids"),
        lambda table: table.pop("checksums"),
        lambda table: table.pop("__metadata__"),
        lambda table: table["__metadata__"].update(kvgen_cache="[]"),
        lambda table: table["__metadata__"].update(kvgen_cache='{"fingerprint": {"dtype": "x"}}'),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(file: Path, change: Any) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CacheFileError, match=r"no cache file of kvgen|cut short|damaged"):
        open_cache_file(file)


def test_a_sound_file_that_does_not_fit_the_layers_is_refused(file: Path) -> None:
    cache = KVCache(holding([], window=8).specs)
    with pytest.raises(CacheFileError, match="does not hold what the layers"):
        load_cache(open_for(file, OWN), cache)
    assert cache.position == 0


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("dtype", "dtype float32, not other"),
        ("attention", "attention sdpa, not other"),
        ("storage", "--cache plain, not other"),
        ("configuration", "another model configuration"),
        ("weights", "another set of weights"),
        ("tokenizer", "another tokenizer"),
    ],
)
def test_whatever_differs_is_named(file: Path, field: str, message: str) -> None:
    with pytest.raises(CacheFileError, match=message):
        open_for(file, Fingerprint(**{**vars(OWN), field: "other"}))
    open_for(file, Fingerprint(**{**vars(OWN), "chat_template": "other"}))


def test_a_cache_is_not_written_for_ids_it_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 20 tokens, not 19"):
        save_cache(tmp_path / "kept.kv", holding(IDS), IDS[:-1], OWN)


def test_a_full_disk_leaves_the_old_file_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_cache(file, holding(IDS[:5]), IDS[:5], OWN)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cache_files import OWN, save_cache
from test_reuse import holding
ids = [int(sys.argv[3])] * 2000
cache = holding(ids)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    save_cache(Path(sys.argv[2]), cache, ids, OWN)
"""


def test_two_writers_leave_one_whole_file_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "kept.kv"
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], **pipes) for name in ("1", "2")]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            opened = open_cache_file(path)
            opened.check()
            seen |= set(opened.ids)
            assert len(set(opened.ids)) == 1
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.stdin.close()
        writer.stdout.close()
    assert seen <= {1, 2}
    assert seen
    assert os.listdir(tmp_path) == [path.name]
