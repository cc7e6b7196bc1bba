"""Cache files: the tensors of a cache, the ids it holds, and what it was made with, in one file.

A file is a safetensors file, so no code is ever read from it. Its metadata carry a version and one
JSON header; its tensors are what the cache holds, then the token ids, last a table of checksums:
CRC-32 of the file's beginning up to the tensors, then of each tensor in file order. Reading maps
the file into memory and checks every byte of it. Reading the header alone needs no torch.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from kvgen.cache.checksum import bytes_of, checksums
from kvgen.cache.fingerprint import Fingerprint
from kvgen.cache.state import State
from kvgen.errors import UsageError
from kvgen.storage import is_device, replace_atomically

FORMAT = 1
"""Raised when a file of the new kvgen would be read wrongly by an older one."""
_FORMAT_KEY, _HEADER_KEY = "kvgen_cache_format", "kvgen_cache"
_IDS, _CHECKSUMS = "token_ids", "checksums"
_MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself
_DTYPES = {  # what safetensors calls torch's dtypes, and bytes per number
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "I16": ("int16", 2),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "BOOL": ("bool", 1),
}
_NAMES = {name: short for short, (name, _) in _DTYPES.items()}


class CacheFileError(UsageError):
    """A cache file that cannot be read, or that is not for what runs now."""


@dataclass(frozen=True)
class Header:
    """What a cache file says of itself."""

    fingerprint: Fingerprint
    model: str
    """The model's name, for people; the fingerprint tells models apart."""
    layers: list[str]
    """The kind of each layer."""
    numbers: dict[str, int] = field(default_factory=dict)
    """The whole numbers of the cache's state."""
    seconds: float | None = None
    """What forwarding all tokens held takes at the rate measured when they were computed."""
    snapshot: bool = False
    """Whether the cache was kept one token before its prompt's end, as it cannot go back."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else its writer wants to find again; any JSON."""


@dataclass(frozen=True)
class _Entry:
    """One tensor: its bytes lie from ``begin`` to ``end``, counted from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class CacheFile:
    """A cache file, opened and checked as far as its layout goes."""

    path: Path
    header: Header
    content: Any
    """The file, mapped."""
    entries: tuple[_Entry, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(self.content)

    @property
    def ids(self) -> list[int]:
        """The tokens that the cache holds."""
        entry = self._entry(_IDS)
        return list(memoryview(self.content)[entry.begin : entry.end].cast("i"))

    def layer_bytes(self) -> list[int]:
        """Bytes stored for each layer."""
        counts = [0] * len(self.header.layers)
        for entry in self.entries:
            if entry.name.startswith("layers."):
                counts[int(entry.name.split(".")[1])] += entry.end - entry.begin
        return counts

    def require(self, fingerprint: Fingerprint) -> None:
        """Raises ``CacheFileError``, naming every difference, unless it was made with this."""
        different = self.header.fingerprint.differences(fingerprint)
        if different:
            raise CacheFileError(
                f"{self.path} was written by {self.header.model or 'another model'} with "
                f"{'; '.join(different)}. It was left as it is; choose another file"
            )

    def check(self) -> None:
        """Hold every byte against its checksum. Raises ``CacheFileError`` naming what differs."""
        self._check([*range(len(self.entries))])

    def check_header(self) -> None:
        """As ``check``, for the header and the ids alone."""
        self._check([0, 1 + self.entries.index(self._entry(_IDS))])

    def _check(self, which: list[int]) -> None:
        """``which``: places in the table of checksums."""
        *entries, table = self.entries
        view = memoryview(self.content)
        stored = view[table.begin : table.end].cast("I")
        pieces = [view[: entries[0].begin], *(view[e.begin : e.end] for e in entries)]
        names = ["its header", *(entry.name for entry in entries)]
        for place, found in zip(which, checksums(pieces[i] for i in which), strict=True):
            if found != stored[place]:
                raise CacheFileError(
                    f"{self.path} is damaged: {names[place]} does not match its checksum; it was "
                    "left as it is. Delete it, or choose another file"
                )

    def state(self) -> State:
        """The tensors, as views of the file; writing to them changes memory only."""
        import torch

        every = torch.frombuffer(self.content, dtype=torch.uint8)
        tensors = {
            entry.name: every[entry.begin : entry.end]
            .view(getattr(torch, _DTYPES[entry.dtype][0]))
            .view(entry.shape)
            for entry in self.entries
            if entry.name.startswith("layers.")
        }
        return State(tensors, dict(self.header.numbers))

    def _entry(self, name: str) -> _Entry:
        return next(entry for entry in self.entries if entry.name == name)


def write_cache_file(path: Path, header: Header, ids: Iterable[int], state: State) -> int:
    """Write a cache's ``state`` and the ``ids`` it holds, whole or not at all; returns the bytes.

    Raises ``OSError``. Tensors are written one after another: no second copy of all is made.
    """
    import torch

    header = replace(header, numbers=state.numbers)
    tensors = state.tensors | {_IDS: torch.tensor(list(ids), dtype=torch.int32)}
    # The widest numbers first, so that each lies at a multiple of its own width.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    table: dict[str, Any] = {
        "__metadata__": {_FORMAT_KEY: str(FORMAT), _HEADER_KEY: json.dumps(asdict(header))}
    }
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        dtype = _NAMES[str(tensors[name].dtype).removeprefix("torch.")]
        shape = list(tensors[name].shape)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    checks = 4 * (len(names) + 1)
    table[_CHECKSUMS] = {"dtype": "U8", "shape": [checks], "data_offsets": [end, end + checks]}
    text = json.dumps(table).encode("utf-8")
    text += b" " * (-(8 + len(text)) % 64)
    beginning = len(text).to_bytes(8, "little") + text

    def write(file: BinaryIO) -> None:
        found = [zlib.crc32(beginning)]
        file.write(beginning)
        for name in names:
            data = bytes_of(tensors[name])
            found.append(zlib.crc32(data))
            file.write(data)
        file.write(b"".join(number.to_bytes(4, "little") for number in found))

    replace_atomically(path, write, private=True)
    return len(beginning) + end + checks


def open_cache_file(path: Path) -> CacheFile:
    """Map a cache file; read and check its header and ids.

    Raises ``CacheFileError`` for what is none, is damaged or cut short, or has another format.
    """
    if is_device(path):  # a pipe would be waited for
        raise CacheFileError(f"{path} cannot hold a cache: give a file")
    try:
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    except OSError as error:
        raise CacheFileError(f"cannot read {path}: {error.strerror}") from error
    table, start = _table(path, content)
    entries = _entries(path, table, start)
    if len(content) != entries[-1].end:
        raise CacheFileError(
            f"{path} is cut short or was added to: {len(content):,} bytes where its header counts "
            f"{entries[-1].end:,}; it was left as it is. Delete it, or choose another file"
        )
    try:
        fields = json.loads(table["__metadata__"][_HEADER_KEY])
        header = Header(**{**fields, "fingerprint": Fingerprint(**fields["fingerprint"])})
    except (ValueError, KeyError, TypeError) as error:
        raise _no_cache_file(path) from error
    file = CacheFile(path, header, content, entries)
    file.check_header()
    return file


def _table(path: Path, content: Any) -> tuple[dict[str, Any], int]:
    """The safetensors header, and where the tensors begin. Raises ``CacheFileError``."""
    length = int.from_bytes(content[:8], "little")
    try:
        if len(content) < 8 or length > min(len(content) - 8, _MAX_HEADER):
            raise ValueError("no header")
        table = json.loads(content[8 : 8 + length])
        version = table["__metadata__"][_FORMAT_KEY]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_cache_file(path) from error
    if version != str(FORMAT):
        raise CacheFileError(
            f"{path} has cache format {version!r}, and this kvgen reads format {FORMAT}; it was "
            "left as it is. Use the kvgen that wrote it, or choose another file"
        )
    return table, 8 + length


def _entries(path: Path, table: dict[str, Any], start: int) -> tuple[_Entry, ...]:
    """The tensors in file order, found to lie one after another."""
    try:
        entries = [
            _Entry(
                name, one["dtype"], tuple(one["shape"]), *(start + n for n in one["data_offsets"])
            )
            for name, one in table.items()
            if name != "__metadata__"
        ]
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        for before, entry in zip([None, *entries], entries, strict=False):
            if entry.begin != (before.end if before else start):
                raise ValueError("tensors do not follow one another")
            if entry.end - entry.begin != prod(entry.shape) * _DTYPES[entry.dtype][1]:
                raise ValueError("a shape does not fit its bytes")
        names = [entry.name for entry in entries]
        if names[-1] != _CHECKSUMS or _IDS not in names:
            raise ValueError("the file ends otherwise")
        if prod(entries[-1].shape) != 4 * len(entries):
            raise ValueError("there are checksums for other tensors")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _no_cache_file(path) from error
    return tuple(entries)


def _no_cache_file(path: Path) -> CacheFileError:
    return CacheFileError(
        f"{path} is no cache file of kvgen, or is damaged or cut short at its beginning; it was "
        "left as it is. Delete it, or choose another file"
    )
