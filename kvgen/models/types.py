"""The records that cross the models room's door. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ProgressCallback = Callable[[str, int, int], None]
"""Called with what is being done, how much is done and the total, in that work's own unit."""

SourceKind = Literal["folder", "hub", "gguf", "random weights"]
Spread = Literal["none", "tensor", "auto"]


def no_progress(_what: str, _done: int, _total: int) -> None:
    """The callback used when nobody listens."""


@dataclass(frozen=True)
class LoadOptions:
    """What the user asked for. ``model=None`` means the default model.

    ``load_format`` "dummy" fills an architecture with random weights, see ``kvgen.models.dummy``.
    ``spread`` is how a model is divided, see ``kvgen.models.spread``: "tensor" over the ranks of
    this run, "auto" over the devices of this machine.
    ``attention`` is what single tokens attend with: auto, model (its own) or kvgen. ``tune`` "auto"
    chooses by timing how linear layers multiply a single row, "off" leaves it to the library.
    """

    model: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    offline: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    spread: Spread = "none"
    attention: str = "auto"
    tune: Literal["auto", "off"] = "auto"


@dataclass(frozen=True)
class ModelSource:
    """What a model name was resolved to.

    ``path`` is a folder with safetensors, except for a GGUF file that is still to be converted,
    where it is the file, and for random weights, where it may be an architecture file.
    ``revision`` is the Hub commit; ``sha256`` the GGUF file's content hash.
    """

    name: str
    kind: SourceKind
    path: Path
    revision: str | None = None
    sha256: str | None = None

    @property
    def needs_conversion(self) -> bool:
        """Whether ``path`` is a GGUF file rather than a loadable folder."""
        return self.kind == "gguf" and not self.path.is_dir()


@dataclass
class LoadedModel:
    """A model ready to run: evaluation mode, on its device, no gradients.

    ``config`` is the text decoder's. ``stop_ids`` is the union of every end-of-text id that the
    tokenizer, the configuration and the generation configuration name. ``context_limit`` counts
    tokens, None when the model has no limit. ``rotary_change`` is the length in tokens past which
    the model makes keys with another rotary base, None for most. ``load_s`` covers configuration,
    weights and the move to the device; ``tokenizer_s`` the tokenizer; ``convert_s`` a GGUF
    conversion, 0 when none ran.
    All three are seconds. ``attention`` is as it was asked for (see ``LoadOptions``);
    ``products`` is what ``choose_products`` chose.
    """

    source: ModelSource
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    stop_ids: frozenset[int]
    context_limit: int | None
    load_s: float
    tokenizer_s: float
    convert_s: float = 0.0
    rotary_change: int | None = None
    attention: str = "auto"
    products: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtype_name(self) -> str:
        """Of weights and cache, such as ``float32``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding table: the ids that the model knows, counted from 0."""
        rows: int = self.model.get_input_embeddings().weight.shape[0]
        return rows
