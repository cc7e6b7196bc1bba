"""What a stored cache depends on besides its tokens: if any of it differs, the cache is refused.

Knows the attributes of models and tokenizers by name; imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.cache.checksum import checksums
from kvgen.cache.policy import Policy
from kvgen.cache.spec import LayerSpec

# Of a configuration: what says where it came from, not what is computed.
_PROVENANCE = ("transformers_version", "dtype", "torch_dtype", "architectures")


@dataclass(frozen=True)
class Fingerprint:
    """Each part as a short text: itself where a person can read it, else a hash.

    The order is that of ``differences``: what follows from an earlier part comes later.
    """

    dtype: str
    """Of weights and cache."""
    configuration: str
    """Hash of the model's configuration and of what each layer stores."""
    weights: str
    """Hash of every weight's name, shape and checksum."""
    tokenizer: str
    """Hash of the tokenizer's rules and vocabulary."""
    attention: str
    """The attention implementation."""
    storage: str
    """What the storage policy stores."""
    chat_template: str
    """Hash of the chat template. It is compared for explanation only: ids tell what changed."""

    def differences(self, other: Fingerprint) -> list[str]:
        """What keeps a cache of ``self`` from serving ``other``, each in a few words."""
        found = []
        for name, what in _READABLE.items():
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                found.append(f"{what} {mine}, not {others}")
        for name, what in _HASHED.items():
            if getattr(self, name) != getattr(other, name):
                found.append(f"another {what}")
        # Converted weights differ in every byte, which says nothing more.
        if self.dtype != other.dtype and len(found) > 1:
            found = [one for one in found if one != f"another {_HASHED['weights']}"]
        return found


_READABLE = {"dtype": "dtype", "attention": "attention", "storage": "--cache"}
_HASHED = {
    "configuration": "model configuration",
    "weights": "set of weights",
    "tokenizer": "tokenizer",
}


def fingerprint(
    model: Any, tokenizer: Any, specs: Sequence[LayerSpec], policy: Policy, attention: str
) -> Fingerprint:
    """The fingerprint of a loaded model whose caches have these ``specs`` under ``policy``.

    ``attention`` names what it attends with. Reads every weight once.
    """
    return Fingerprint(
        dtype=str(model.dtype).removeprefix("torch."),
        configuration=_hash(_meaning(model.config.to_dict()), [repr(spec) for spec in specs]),
        weights=_weights(model),
        tokenizer=_tokenizer(tokenizer),
        attention=attention,
        storage=policy.stored,
        chat_template=_hash(getattr(tokenizer, "chat_template", None)),
    )


def _weights(model: Any) -> str:
    # Tied weights once; buffers that are not saved follow from the configuration.
    unique = {tensor.data_ptr(): (name, tensor) for name, tensor in model.state_dict().items()}
    named = [(name, tensor) for name, tensor in unique.values()]
    found = checksums([tensor for _, tensor in named])
    return _hash(
        [
            [name, list(tensor.shape), value]
            for (name, tensor), value in zip(named, found, strict=True)
        ]
    )


def _tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _hash(backend.to_str())
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    return _hash(type(tokenizer).__name__, vocabulary)


def _meaning(config: Any) -> Any:
    """A configuration without what says nothing about the computation."""
    if isinstance(config, dict):
        return {
            str(key): _meaning(value)
            for key, value in config.items()
            if not str(key).startswith("_") and key not in _PROVENANCE
        }
    return [_meaning(item) for item in config] if isinstance(config, list | tuple) else config


def _hash(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
