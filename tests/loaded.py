"""A tiny model of any type as the models room would hand it over, without a folder on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import tiny_model

from kvgen.models import LoadedModel
from kvgen.models.types import ModelSource


class Letters:
    """A tokenizer of one id per character."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [5 + ord(character) % 100 for character in text]}

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self.decode([ids])

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


def loaded_tiny(model_type: str, limit: int | None = None, **overrides: Any) -> LoadedModel:
    """A toy of ``model_type`` in float32; ``limit`` is its context in tokens."""
    torch.set_num_threads(1)
    model = tiny_model(model_type, **overrides).requires_grad_(False)
    return LoadedModel(
        source=ModelSource(f"tiny-{model_type}", "folder", Path("tiny")),
        model=model,
        tokenizer=Letters(),  # type: ignore[arg-type]
        config=model.config.get_text_config(decoder=True),
        dtype=torch.float32,
        device=torch.device("cpu"),
        stop_ids=frozenset(),
        context_limit=limit,
        load_s=0.0,
        tokenizer_s=0.0,
    )
