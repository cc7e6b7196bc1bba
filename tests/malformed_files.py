"""GGUF files, saved results and saved tokens that are damaged or were edited by hand."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from malformed import DROP, Case, Place, file_case

_CONVERT = "generate x -n 2 -q -m $F"


def _gguf(name: str, change: Callable[[bytes], bytes], says: str, code: int = 3) -> Case:
    def lay(place: Place) -> Path:
        return place.file("m.gguf", change(place.gguf))

    return Case(_CONVERT, code, says, lay, f"GGUF {name}")


def _overwritten(at: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    new = struct.pack(layout, value)
    return lambda whole: whole[:at] + new + whole[at + len(new) :]


def _in_first_tensor(skip: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    """Overwrite a number of the first tensor's entry, ``skip`` bytes after its name."""
    name = b"output.weight"

    def change(whole: bytes) -> bytes:
        at = whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        return _overwritten(at + skip, layout, value)(whole)

    return change


def _written(name: str, says: str, architecture: str = "llama", **fields: Any) -> Case:
    """A GGUF file without tensors that says no more than ``fields``."""

    def lay(place: Place) -> Path:
        from gguf import GGUFWriter

        path = place.root / "m.gguf"
        writer = GGUFWriter(str(path), architecture)
        for field, value in fields.items():
            writer.add_key_value(f"{architecture}.{field}", value, _kind(value))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return Case(_CONVERT, 3, says, lay, f"GGUF {name}")


def _kind(value: Any) -> Any:
    from gguf import GGUFValueType

    return GGUFValueType.STRING if isinstance(value, str) else GGUFValueType.UINT32


GGUFS = [
    _gguf("of nothing", lambda _: b"", "not a GGUF file"),
    _gguf("of four letters", lambda _: b"GGUF", "not a whole GGUF file"),
    _gguf("that is a web page", lambda _: b"<html>not found</html>", "not a GGUF file"),
    _gguf("of the other byte order", lambda whole: b"FUGG" + whole[4:], "not a GGUF file"),
    *(
        _gguf(f"cut at {keep}", lambda whole, keep=keep: whole[:keep], "not a whole GGUF file")
        for keep in (5, 24, 100, 3000)
    ),
    *(
        _gguf(f"cut at {keep}", lambda whole, keep=keep: whole[:keep], "is cut short")
        for keep in (60_000, -64, -1)
    ),
    *(
        _gguf(f"of version {version}", _overwritten(4, "<I", version), f"version {version}")
        for version in (0, 1, 99)
    ),
    _gguf("of countless tensors", _overwritten(8, "<Q", 1 << 40), "not a whole GGUF file"),
    _gguf("of countless fields", _overwritten(16, "<Q", 1 << 40), "not a whole GGUF file"),
    _gguf("with an endless name", _overwritten(24, "<Q", 1 << 50), "not a whole GGUF file"),
    _gguf("of no tensors", _overwritten(8, "<Q", 0), "lacks lm_head.weight"),
    _gguf("with 99 dimensions", _in_first_tensor(0, "<I", 99), "99 dimensions"),
    _gguf("with a huge tensor", _in_first_tensor(4, "<Q", 1 << 40), "are free", code=4),
    _gguf("with an unknown tensor type", _in_first_tensor(20, "<I", 250), "250"),
    _gguf("with a tensor beyond its end", _in_first_tensor(24, "<Q", 1 << 40), "is cut short"),
    _written("of an unknown architecture", "oddity", "oddity"),
    _written("without anything", "cannot convert"),
    _written("with a word for a number", "num_hidden_layers", block_count="two"),
]

_SHOW = "report $F"


def _edited(name: str, path: Sequence[str | int], value: Any, says: str) -> Case:
    """A saved result with one part replaced or left out."""

    def lay(place: Place) -> Path:
        document: Any = copy.deepcopy(dict(place.result))
        part = document
        for key in path[:-1]:
            part = part[key]
        if value == DROP:
            del part[path[-1]]
        else:
            part[path[-1]] = value
        return place.file("result.json", json.dumps(document))

    return Case(_SHOW, 2, says, lay, f"result with {name}")


def _twice(place: Place) -> Path:
    return place.file("result.json", json.dumps(place.result))


_ROW = ("rows", 0)
_ITEM = (*_ROW, "results", 0)

RESULTS = [
    *(
        file_case(f"result of {text[:40]!r}", "result.json", text, _SHOW, 2, says)
        for text, says in (
            ("", "is not JSON"),
            ("{", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ("[]", "no schema"),
            ("null", "no schema"),
            ('{"schema": 5}', "schema 5"),
            ('{"schema": "kvgen.compare/2"}', "'kvgen.compare/2'"),
            ('{"schema": "kvgen.generate/1"}', "'kvgen.generate/1'"),
            ('{"schema": "kvgen.compare/1"}', "model is missing"),
        )
    ),
    *(_edited(f"no {key}", (key,), DROP, f"{key} is missing") for key in ("rows", "runs", "fits")),
    *(_edited(f"wrong {key}", (key,), 5, f"{key} must be an ") for key in ("model", "contestants")),
    *(_edited(f"no entry in {key}", (key,), [], "empty") for key in ("contestants", "depths")),
    _edited("empty rows", ("rows",), [], "its rows are not those of its depths"),
    _edited("another depth", (*_ROW, "depth"), -3, "its rows are not those of its depths"),
    _edited("no results", (*_ROW, "results"), [], "are not those of its contestants"),
    _edited("an unknown name", (*_ITEM, "contestant"), "nobody", "not those of its contestants"),
    _edited("no new ids", (*_ROW, "new_ids"), [], "tokens at depth 0 are missing"),
    _edited("no context", (*_ROW, "context_ids"), [], "tokens at depth 0 are missing"),
    _edited("no steps", (*_ITEM, "step_s"), [], "lacks steps"),
    _edited("text for time", (*_ITEM, "step_s"), ["x", "x"], "cannot be 'x'"),
    _edited("text for bytes", (*_ITEM, "kv_bytes_peak"), "x", "cannot be 'x'"),
    _edited("true for a count", ("new_tokens",), True, "cannot be True"),
    _edited("an unknown verdict", ("prompt_source",), "dreamt", "cannot be 'dreamt'"),
    Case("report $F $F", 2, "named twice", _twice, "the same result twice"),
]

_REPLAY = "compare -m $M --tokens $F -r 1 -q"


def _row(**changes: Any) -> str:
    row = {"depth": 0, "context_ids": [1, 2], "new_ids": [3]} | changes
    return json.dumps({"schema": "kvgen.tokens/1", "model": "m", "rows": [row]})


TOKENS = [
    file_case(f"tokens {text}", "tokens.json", text, _REPLAY, 2, "token")
    for text in (
        "",
        "{}",
        '{"rows": []}',
        '{"rows": [5]}',
        _row(context_ids=[]),
        _row(new_ids=[]),
        _row(context_ids=[-1]),
        _row(context_ids=["a"]),
        _row(context_ids=[1.5]),
        _row(new_ids=[99_999]),
        _row(depth=2),
        _row(depth=-1),
        _row(depth="x"),
    )
]


def _kept(name: str, change: Callable[[bytes], bytes], says: str = "cache file") -> list[Case]:
    """A kept prompt cache after ``change``, for every command that reads one."""

    def lay(place: Place) -> Path:
        return place.file("kept", change(place.kept))

    lines = (
        "cache show $F",
        "cache verify $F -m $M -q",
        "generate Time -m $M -n 1 -q --prompt-cache $F",
        "cache save Time $F -m $M -q",
    )
    return [Case(line, 2, says, lay, f"kept cache {name}, {line[:12]}") for line in lines]


def _flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:at] + bytes([whole[at] ^ 1]) + whole[at:][1:]


KEPT = [
    *_kept("of nothing", lambda _: b"", "kept"),
    *_kept("of other bytes", lambda _: b"junk" * 100, "kept"),
    *_kept("that is a web page", lambda _: b"<html>not found</html>", "kept"),
    *_kept("cut at 4", lambda whole: whole[:4], "kept"),
    *_kept("cut in its header", lambda whole: whole[:200], "kept"),
    *_kept("cut at its end", lambda whole: whole[:-1], "kept"),
    *_kept("with a number changed in its header", _flipped(300), "kept"),
    Case("cache show nowhere", 2, "nowhere"),
    Case("cache verify nowhere -m $M", 2, "nowhere"),
    Case("cache show /", 2, "/"),
    Case("generate x -m $M --prompt-cache nowhere --prompt-cache-ro", 2, "nowhere"),
    Case("generate x -m $M --prompt-cache-ro", 2, "give both"),
    Case("generate x -m $M --no-cache --prompt-cache k", 2, "leave out --no-cache"),
    Case("batch nowhere -m $M", 2, "nowhere"),
    Case("batch / -m $M", 2, "cannot read /"),
    Case("batch $F -m $M", 4, "holds no prompts", lambda p: p.file("p", ""), "empty batch"),
    Case("batch $M/config.json -m $M -b 0", 2, "--batch-size"),
    Case("batch $M/config.json -m $M --resume", 2, "name it with --output"),
    Case("batch $M/config.json -m $M --prefix-budget x", 2, "expected a size"),
    Case("batch $M/config.json -m $M --stop ''", 2, "--stop needs text"),
]

REQUESTS = [
    ("{", "is not JSON"),
    ("nonsense", "is not JSON"),
    ("\udcff", "is not UTF-8"),
    ("[]", "is no JSON object"),
    ("5", "is no JSON object"),
    ("{}", "needs a prompt or messages"),
    ('{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}', "and not both"),
    ('{"prompt": 5}', "prompt = 5, which is not text"),
    ('{"prompt": ""}', "the prompt is empty"),
    ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ('{"promt": "x"}', "the nearest is 'prompt'"),
    ('{"prompt": "x", "id": true}', "id = true, which is not"),
    ('{"prompt": "x", "max_new_tokens": 0}', "less than 1 new token"),
    ('{"prompt": "x", "max_new_tokens": "many"}', 'max_new_tokens = "many", which is not'),
    ('{"prompt": "x", "max_new_tokens": 128}', "at most 127 new tokens"),
    ('{"prompt": "x", "seed": -1}', "has a seed"),
    ('{"prompt": "x", "stop": 5}', "neither text nor a list"),
    ('{"prompt": "x", "stop": ""}', "has an empty stop"),
    ('{"prompt": "x", "chat": 1}', "not true or false"),
    ('{"prompt": "x", "chat": true}', "no chat template"),
    ('{"messages": []}', "has messages that are not a list"),
    ('{"messages": [{"role": "user"}]}', "has messages that are not a list"),
]
