"""Reading a model configuration: a transformers config object or the mapping in a config.json.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.errors import ModelError

# One setting under the names that families give it; the first is by far the commonest.
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
QUERY_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


class Settings:
    """The fields of a configuration, by any of the names that models give them."""

    def __init__(self, config: Any) -> None:
        """``config`` is the text decoder's."""
        self._config = config

    def get(self, *names: str) -> Any:
        """The first of ``names`` that is set, or ``None``."""
        for name in names:
            if isinstance(self._config, Mapping):
                value = self._config.get(name)
            else:
                value = getattr(self._config, name, None)
            if value is not None:
                return value
        return None

    def integer(self, *names: str) -> int | None:
        """As ``get``; raises ``ModelError`` for what is not a whole number."""
        value = self.get(*names)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelError(
                f"the configuration's {names[0]} must be a whole number, not {value!r}"
            )
        return value

    def count(self, *names: str) -> int:
        """A whole number of at least 1. Raises ``ModelError`` when it is missing or smaller."""
        value = self.integer(*names)
        if value is None:
            raise ModelError(f"the configuration lacks {names[0]}, so the cache cannot be sized")
        if value < 1:
            raise ModelError(f"the configuration's {names[0]} is {value}; it must be at least 1")
        return value

    def of_layer(self, index: int) -> Settings:
        """The fields as one layer sees them, where layers may differ."""
        each = None if isinstance(self._config, Mapping) else self.get("per_layer_config")
        # An encoder-decoder configuration lists the encoder's layers, which may be fewer.
        if each is None or isinstance(each, Mapping) or index >= len(each):
            return self
        return Settings(each[index])
