"""What a GGUF file says of its model, read from its header alone. No torch.

The gguf package reads every token of the vocabulary into arrays first, which takes seconds; sizes
need a dozen numbers. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvgen.errors import ModelError

_MAGIC = b"GGUF"
_NUMBERS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 8
_MOST = 1 << 26  # entries or bytes of one string; more is a damaged file

# The field of a config.json for each key, which the architecture's name precedes in the file.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "vocab_size": "vocab_size",
}
_TYPES = {
    "llama": "llama",
    "gpt2": "gpt2",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "starcoder2": "starcoder2",
}


def read_gguf(path: Path, name: str) -> tuple[dict[str, Any], int]:
    """The fields of a ``config.json`` for the model in a GGUF file, and its parameters.

    Raises ``ModelError`` for a damaged file and for an architecture without a translation.
    """
    values, tensors, _ = _header(path, name)
    architecture = str(values.get("general.architecture"))
    model_type = _TYPES.get(architecture)
    if model_type is None:
        raise ModelError(
            f"{name}: kvgen cannot size a GGUF of the architecture {architecture!r}; give the "
            "model's config.json instead"
        )
    fields: dict[str, Any] = {"model_type": model_type}
    for key, field in _FIELDS.items():
        value = values.get(f"{architecture}.{key}")
        if value is not None:
            fields[field] = value
    if "use_sliding_window" not in fields and model_type.startswith("qwen"):
        fields["use_sliding_window"] = "sliding_window" in fields
    return fields, sum(tensor.numbers for tensor in tensors)


def check_whole(path: Path, name: str) -> None:
    """Raise ``ModelError`` unless the file is as long as its header says.

    Imports gguf for the sizes of its number formats; tensors in others are passed over.
    """
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): block for kind, block in GGML_QUANT_SIZES.items()}
    values, tensors, begin = _header(path, name)
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{name}: not a whole GGUF file (its alignment is {alignment!r})")
    begin += -begin % alignment
    ends = [
        begin + t.offset + t.numbers * sizes[t.kind][1] // sizes[t.kind][0]
        for t in tensors
        if t.kind in sizes
    ]
    size = path.stat().st_size
    if size < max(ends, default=0):
        raise ModelError(f"{name}: is cut short: {size} bytes of {max(ends)}; fetch it again")


class _Tensor(NamedTuple):
    numbers: int
    kind: int
    offset: int


def _header(path: Path, name: str) -> tuple[dict[str, Any], list[_Tensor], int]:
    """The values, the tensors, and where the header ends. Raises ``ModelError``."""
    try:
        with path.open("rb") as file:
            values, tensors = _read(file, path.stat().st_size)
            return values, tensors, file.tell()
    except (OSError, struct.error, ValueError, KeyError, OverflowError) as error:
        raise ModelError(f"{name}: not a whole GGUF file ({error})") from error


def _read(file: BinaryIO, size: int) -> tuple[dict[str, Any], list[_Tensor]]:
    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, count, pairs = _unpack(file, "<IQQ")
    if version not in (2, 3) or max(count, pairs) > _MOST:
        raise ValueError(f"version {version} with {count} tensors")
    values = {}
    for _ in range(pairs):
        key = _string(file)
        values[key] = _value(file, _unpack(file, "<I")[0], size)
    tensors = []
    for _ in range(count):
        _string(file)
        (dimensions,) = _unpack(file, "<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = _unpack(file, f"<{dimensions}Q")
        tensors.append(_Tensor(prod(shape), *_unpack(file, "<IQ")))
    return values, tensors


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    """A number or a string; of an array only that it is there."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _unpack(file, "<" + _NUMBERS[kind])[0]
    inner, count = _unpack(file, "<IQ")
    if count > size:
        raise ValueError(f"an array of {count} entries")
    if inner == _STRING:
        for _ in range(count):
            length = int.from_bytes(file.read(8), "little")
            file.seek(length, 1)
            if file.tell() > size:
                raise ValueError("a string beyond its end")
    elif inner == _ARRAY:
        for _ in range(count):
            _value(file, _ARRAY, size)
    else:
        file.seek(count * struct.calcsize("<" + _NUMBERS[inner]), 1)
    return None


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > _MOST:
        raise ValueError(f"a string of {length} bytes")
    return file.read(length).decode("utf-8")


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))
