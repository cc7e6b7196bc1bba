"""Which configurations kvgen can serve, and what their models are. Heavy imports inside.

Reads configurations; loads no weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.errors import ModelError
from kvgen.models.types import LoadOptions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

# Where families keep the longest sequence their positions reach. The first is by far the commonest.
_LIMIT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


def read_causal_config(
    folder: Path, raw: dict[str, Any], name: str, options: LoadOptions
) -> PreTrainedConfig:
    """The configuration in a folder whose config.json holds ``raw``.

    Raises ModelError for a model type this transformers does not know, for code that is not
    trusted, and for anything but a decoder that continues text.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, own_code = raw.get("model_type"), "auto_map" in raw
    if own_code and options.trust_remote_code:
        pass  # its own code may define the type
    elif not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{name}: config.json names no model_type")
    elif model_type not in CONFIG_MAPPING:
        if own_code:
            raise ModelError(
                f"{name}: model type {model_type!r} needs Python code from its own repository; "
                "read that code, then pass --trust-remote-code to run it"
            )
        raise ModelError(
            f"{name}: transformers {transformers.__version__} does not know the model type "
            f"{model_type!r}; a newer release may"
        )
    config = transformers.AutoConfig.from_pretrained(
        str(folder),
        trust_remote_code=options.trust_remote_code,
        local_files_only=options.offline or not options.trust_remote_code,
    )
    require_causal(config, name, trusted=options.trust_remote_code)
    return config


def require_causal(config: PreTrainedConfig, name: str, *, trusted: bool = False) -> None:
    """Raise ModelError unless the configuration is of a model that continues text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    architectures = [str(item) for item in getattr(config, "architectures", None) or ()]
    label = architectures[0] if architectures else config.model_type
    refusal = ModelError(f"{name}: {label} is not a causal language model, which kvgen needs")
    own_classes = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if trusted and "AutoModelForCausalLM" in own_classes:
            return
        raise refusal
    if getattr(config, "is_encoder_decoder", False):
        raise refusal
    # Families such as BERT have a causal class too, but their checkpoints read both ways.
    reads_both_ways = getattr(config, "is_decoder", None) is False
    if reads_both_ways and architectures and not any("ForCausalLM" in a for a in architectures):
        raise refusal


def build_skeleton(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """The model without storage for its weights: names and shapes only."""
    import torch
    from transformers import AutoModelForCausalLM

    require_causal(config, name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text decoder's part of a configuration, which for most models is all of it."""
    return config.get_text_config(decoder=True)


def checkpoint_dtype(config: PreTrainedConfig, from_weights: str | None) -> torch.dtype | None:
    """The dtype a checkpoint says it is in, else that of its first floating tensor."""
    import torch

    for place in (config, decoder_config(config)):
        stated = getattr(place, "dtype", None)
        if isinstance(stated, str):
            stated = getattr(torch, stated.removeprefix("torch."), None)
        if isinstance(stated, torch.dtype) and stated.is_floating_point:
            return stated
    return getattr(torch, from_weights) if from_weights else None


def context_limit(config: PreTrainedConfig) -> int | None:
    """The longest sequence in tokens the configuration allows; None when it sets no limit."""
    for name in _LIMIT_NAMES:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            stretched = [r for r in _rotary_settings(config) if r.get("rope_type") == "dynamic"]
            # Dynamic scaling states the length before stretching.
            return int(limit * max((float(r.get("factor", 1)) for r in stretched), default=1))
    return None


def rotary_change(config: PreTrainedConfig) -> int | None:
    """The length in tokens past which the model makes keys with another rotary base, if it does.

    Keys stored before keep the base they were made with, while a forward without a cache makes
    all of them anew, so from there on the two legitimately differ.
    """
    lengths = []
    for settings in _rotary_settings(config):
        kind = settings.get("rope_type")
        original = settings.get("original_max_position_embeddings")
        if kind in ("dynamic", "longrope"):
            lengths.append(original or getattr(config, "max_position_embeddings", None))
    return min((length for length in lengths if length), default=None)


def _rotary_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters, one mapping for all layers or one for each kind of layer."""
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        return []
    each = [item for item in settings.values() if isinstance(item, dict)]
    return each or [settings]


def stop_ids(sources: Iterable[Any]) -> frozenset[int]:
    """Every end-of-text id that any of the sources names, as one id or as a list of them.

    Raises ModelError for anything else.
    """
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        for item in ids if isinstance(ids, list | tuple) else [ids]:
            if item is None:
                continue
            if not isinstance(item, int):
                raise ModelError(f"eos_token_id must be an id or a list of ids, not {item!r}")
            found.add(item)
    return frozenset(found)
