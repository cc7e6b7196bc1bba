"""What a model folder holds, checked before any library reads it. Imports kvgen.errors only.

Looking first costs milliseconds and buys exact messages: which file is cut short, which shard is
missing, that the weights are pickles. Nothing here loads a tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from kvgen.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Loading would turn them into floating-point numbers that nobody trained.
_NO_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64")
# Every model has at least one of each, and no known one comes near so many layers; a library
# would go on making layers until memory is gone.
_COUNTS = (
    "hidden_size",
    "head_dim",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Weights:
    """The safetensors files of a model and the dtype name of their first floating tensor."""

    files: tuple[Path, ...]
    dtype: str | None
    integers: str | None = None
    """One weight that is stored as whole numbers, as only quantized models store them."""


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """The folder's config.json as a dictionary; ModelError when missing or not an object."""
    path = folder / "config.json"
    if not path.is_file():
        hint = ""
        if any(folder.glob("*.gguf")):
            hint = "; it has a .gguf file, which can be given as the model itself"
        raise ModelError(f"{name}: no config.json in the model folder{hint}")
    return read_architecture_file(path, name)


def read_architecture_file(path: Path, name: str) -> dict[str, Any]:
    """The fields of a file written as a config.json is; ModelError for sizes no model can have."""
    fields = read_json_object(path, name)
    inner = fields.get("text_config")
    for place in (fields, inner if isinstance(inner, dict) else {}):
        for field in _COUNTS:
            value = place.get(field)
            if not isinstance(value, int):
                continue
            if value < 1:
                raise ModelError(
                    f"{name}: {field} in {path.name} is {value}; it must be at least 1"
                )
            if field == "num_hidden_layers" and value > _MOST_LAYERS:
                raise ModelError(
                    f"{name}: {field} in {path.name} is {value:,}; no model has over "
                    f"{_MOST_LAYERS:,} layers"
                )
    return fields


def read_json_object(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; ModelError naming the file when it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name}: {path.name} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {path.name} must hold a JSON object")
    return content


def find_weights(folder: Path, name: str) -> Weights:
    """The folder's safetensors files, each checked to be whole.

    Raises ModelError when there are none, when only pickles are there, when the index points
    outside the folder or at absent shards, and when a file is cut short or not safetensors.
    """
    if (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        files = [folder / shard for shard in read_shard_names(folder / INDEX_FILE, name)]
        absent = [file.name for file in files if not _is_file(file)]
        if absent:
            raise ModelError(f"{name}: {_some(absent)} named in {INDEX_FILE} but not in the folder")
        strays = [file.name for file in files if not _lies_inside(file, folder)]
        if strays:
            raise ModelError(
                f"{name}: {_some(strays)} named in {INDEX_FILE} is a link that leads outside the "
                "model folder; copy the file there if you trust it"
            )
    else:
        raise ModelError(f"{name}: {_why_no_weights(folder)}")
    found = [_check_file(file, name) for file in files]
    return Weights(
        tuple(files),
        next((dtype for dtype, _ in found if dtype), None),
        next((weight for _, weight in found if weight), None),
    )


def read_shard_names(index: Path, name: str) -> list[str]:
    """Shard file names in an index, sorted; ModelError for any that is not a plain file name."""
    weight_map = read_json_object(index, name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{name}: {index.name} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise ModelError(f"{name}: {index.name} points outside the model folder: {shard!r}")
        if not shard.endswith(".safetensors"):
            raise ModelError(f"{name}: {index.name} names {shard!r}, which is not safetensors")
    return sorted(set(weight_map.values()))


def _stays_inside(shard: str) -> bool:
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            return False
    return bool(shard.strip())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _lies_inside(file: Path, folder: Path) -> bool:
    """Whether the file itself, links followed, is the folder's own, or in the Hub cache's store."""
    own = folder.resolve()
    # There, a model's folder holds links to ../../blobs and nothing else.
    store = [own.parent.parent / "blobs"] if own.parent.name == "snapshots" else []
    return any(file.resolve().is_relative_to(place) for place in (own, *store))


def _why_no_weights(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        return (
            f"only pickled weights ({_some(pickles)}), which kvgen refuses because reading them "
            "can run code; if you trust them, load the model with transformers and save it "
            "again with save_pretrained, which writes safetensors"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = f"; found only {_some(others)}" if others else ""
    return f"no weights: expected {SINGLE_FILE} or {INDEX_FILE}{found}"


def _check_file(path: Path, name: str) -> tuple[str | None, str | None]:
    """Check that a safetensors file is as long as its header says.

    Returns its first float dtype and its first weight of whole numbers.
    """
    try:
        header, data_start, size = _read_header(path)
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        dtypes = {key: str(entry["dtype"]) for key, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ModelError(
            f"{name}: {path.name} is not a whole safetensors file ({error}); fetch it again"
        ) from error
    if size < data_start + end:
        raise ModelError(
            f"{name}: {path.name} is cut short: {size} bytes of {data_start + end}; fetch it again"
        )
    first = next((_FLOATS[dtype] for dtype in dtypes.values() if dtype in _FLOATS), None)
    whole = (k for k, dtype in dtypes.items() if k.endswith(".weight") and dtype in _NO_WEIGHTS)
    return first, next(whole, None)


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data start and the file's size, in bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError("its header is missing or cut short")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, 8 + length, size


def _some(names: list[str], limit: int = 3) -> str:
    """Up to three names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
