"""A model's configuration and the size of its weights, without loading any of it. No torch.

Imports huggingface_hub inside a function, for names that are Hub ids only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgen.errors import ModelError, UsageError
from kvgen.measure.parameters import estimate_parameters
from kvgen.models import hub
from kvgen.models.gguf_header import read_gguf
from kvgen.models.names import DEFAULT_HUB_ID, DEFAULT_NAME, existing, find_default_gguf
from kvgen.models.store import find_converted_before
from kvgen.models.types import LoadOptions
from kvgen.models.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    Weights,
    find_weights,
    read_architecture_file,
    read_config,
    read_json_object,
)

_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Architecture:
    """What is known of a model before it is loaded.

    ``config`` is the mapping in its ``config.json``. ``dtype`` is what the checkpoint says it is
    in, float32 where it says nothing. ``weight_bytes`` are those of the weights in that dtype, and
    ``weight_source`` says how they are known.
    """

    name: str
    config: dict[str, Any] = field(repr=False)
    dtype: str = "float32"
    weight_bytes: int | None = None
    weight_source: str = "no estimate for this architecture"

    @property
    def itemsize(self) -> int:
        """Bytes per number of ``dtype``."""
        return _ITEMSIZES[self.dtype]

    def weight_bytes_in(self, itemsize: int) -> int | None:
        """The weights' bytes when they are loaded with ``itemsize`` bytes per number."""
        return None if self.weight_bytes is None else self.weight_bytes * itemsize // self.itemsize


def read_architecture(options: LoadOptions) -> Architecture:
    """The architecture that ``options.model`` names: an architecture file, a model folder, a GGUF
    file, a Hub id (whose ``config.json`` is fetched, no weights), or the default model.

    Raises ``ModelError`` when there is none or it cannot be read.
    """
    name, path = options.model, None
    if name is None:
        name, path = DEFAULT_NAME, find_default_gguf()
        if path is None:
            return _from_hub(DEFAULT_HUB_ID, options)
    elif not name.strip():
        raise UsageError("the model name is empty; give a file, a folder or a Hub id")
    else:
        path = existing(name)
    if path is None:
        if not hub.is_hub_id(name) or name.lower().endswith((".json", ".gguf")):
            raise ModelError(f"{name}: no such file or folder, and not the form of a Hub id")
        return _from_hub(name, options)
    if path.is_dir():
        return _from_folder(name, path)
    if path.suffix.lower() == ".gguf":
        converted = find_converted_before(path)
        if converted is not None:  # its config.json says the same, and is read at once
            return _from_folder(name, converted)
        config, parameters = read_gguf(path, name)
        # kvgen converts GGUF files to float32, in which they are loaded.
        return Architecture(name, config, "float32", parameters * 4, "counted in the GGUF header")
    if path.suffix.lower() == ".json":
        return _described(name, read_architecture_file(path, name))
    raise ModelError(f"{name}: neither a model folder, a .json file nor a .gguf file")


def _from_folder(name: str, folder: Path) -> Architecture:
    config = read_config(folder, name)
    if not ((folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()):
        return _described(name, config)
    weights: Weights = find_weights(folder, name)
    size = sum(file.stat().st_size for file in weights.files)
    return Architecture(
        name, config, _dtype(config, weights.dtype), size, "size of the safetensors files"
    )


def _from_hub(name: str, options: LoadOptions) -> Architecture:
    path = hub.fetch_file(name, "config.json", options)
    if path is None:
        raise ModelError(f"{name}: has no config.json on the Hub")
    config = read_architecture_file(path, name)
    index = hub.fetch_file(name, INDEX_FILE, options)
    if index is not None:
        size = (read_json_object(index, name).get("metadata") or {}).get("total_size")
        if isinstance(size, int) and size > 0:
            return Architecture(
                name, config, _dtype(config), size, "total in the safetensors index"
            )
    return _described(name, config)


def _described(name: str, config: dict[str, Any]) -> Architecture:
    dtype = _dtype(config)
    parameters = estimate_parameters(config)
    if parameters is None:
        return Architecture(name, config, dtype)
    size = parameters * _ITEMSIZES[dtype]
    return Architecture(name, config, dtype, size, "estimated from the configuration")


def _dtype(config: dict[str, Any], from_weights: str | None = None) -> str:
    part = config.get("text_config")
    for place in (config, part if isinstance(part, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            stated = str(place.get(key)).removeprefix("torch.")
            if stated in _ITEMSIZES:
                return stated
    return from_weights or "float32"
