"""Loads a model and its tokenizer, checked. Imports torch and transformers inside the functions."""

from __future__ import annotations

import importlib
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.errors import ModelError
from kvgen.models import gguf
from kvgen.models.causal import (
    checkpoint_dtype,
    context_limit,
    decoder_config,
    read_causal_config,
    rotary_change,
    stop_ids,
)
from kvgen.models.device import check_dtype_name, choose_device, choose_dtype
from kvgen.models.failures import failing_as_model_error
from kvgen.models.names import resolve
from kvgen.models.products import choose_products
from kvgen.models.quiet import hide_kernel_advice, quiet_libraries
from kvgen.models.ranks import local
from kvgen.models.spread import check_spread, spread_arguments
from kvgen.models.tokenizers import load_tokenizer
from kvgen.models.types import LoadedModel, LoadOptions, ModelSource, ProgressCallback, no_progress
from kvgen.models.weights import Weights, find_weights, read_config
from kvgen.storage import cache_root

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger("kvgen")

_LAYER = re.compile(r"\.(\d+)\.")


def load_model(options: LoadOptions, progress: ProgressCallback | None = None) -> LoadedModel:
    """Find, convert if need be, check and load a model and its tokenizer.

    Raises UsageError for an unknown or absent dtype or device, InputError when memory runs out,
    and ModelError for everything that is wrong with the model; never returns a model with weights
    that its files do not hold, unless ``load_format`` asks for random ones.
    """
    check_spread(options)
    if options.load_format == "dummy":
        from kvgen.models.dummy import load_dummy

        return load_dummy(options)
    report = progress or no_progress
    check_dtype_name(options.dtype)
    device = choose_device(options.device)
    source, convert_s = _resolved_folder(options, report)
    name = source.name
    _import_libraries(name)

    started = time.perf_counter()
    raw = read_config(source.path, name)
    weights = find_weights(source.path, name)
    if weights.integers and "quantization_config" not in raw:
        raise ModelError(
            f"{name}: {weights.integers} is stored as whole numbers, and config.json does not say "
            "that the model is quantized"
        )
    if options.trust_remote_code and "auto_map" in raw:
        logger.warning("running Python code that comes with the model %s", name)
    with failing_as_model_error(f"{name}: cannot use its config.json"), quiet_libraries():
        config = read_causal_config(source.path, raw, name, options)
    checked = time.perf_counter()
    # Before the weights: a missing tokenizer then shows in milliseconds, not after a long read.
    tokenizer = load_tokenizer(source.path, name, options)
    tokenized = time.perf_counter()
    dtype = choose_dtype(options.dtype, checkpoint_dtype(config, weights.dtype), device)
    model = _read_weights(source.path, config, dtype, name, options)
    if device.type == "cpu":
        hide_kernel_advice()
    with failing_as_model_error(name):
        if options.spread == "none":
            model = model.to(device)
        model = model.eval().requires_grad_(False)
        _read_in(model)
    ended = time.perf_counter()

    decoder = decoder_config(model.config)
    return LoadedModel(
        source=source,
        model=model,
        tokenizer=tokenizer,
        config=decoder,
        dtype=dtype,
        device=device,
        stop_ids=stop_ids((tokenizer, model.config, decoder, model.generation_config)),
        context_limit=context_limit(decoder),
        load_s=(checked - started) + (ended - tokenized),
        tokenizer_s=tokenized - checked,
        convert_s=convert_s,
        rotary_change=rotary_change(decoder),
        attention=options.attention,
        products=choose_products(model, cache_root()) if options.tune == "auto" else {},
    )


def _import_libraries(name: str) -> None:
    """Import transformers ahead of the clock: its seconds are not the model's."""
    with failing_as_model_error(name):
        importlib.import_module("transformers.models.auto.modeling_auto")


def _resolved_folder(options: LoadOptions, progress: ProgressCallback) -> tuple[ModelSource, float]:
    """The source with a folder to load from, and the seconds a conversion took."""
    source = resolve(options, progress)
    if not source.needs_conversion:
        return source, 0.0
    started = time.perf_counter()
    folder = gguf.convert(source, lambda path: _check_folder(path, source.name), progress)
    converted = ModelSource(source.name, source.kind, folder, source.revision, source.sha256)
    return converted, time.perf_counter() - started


def _check_folder(folder: Path, name: str) -> None:
    """Raise ModelError unless the folder loads completely; what it loads is dropped."""
    options = LoadOptions(offline=True)
    raw = read_config(folder, name)
    weights: Weights = find_weights(folder, name)
    with failing_as_model_error(f"{name}: cannot use its config.json"), quiet_libraries():
        config = read_causal_config(folder, raw, name, options)
    load_tokenizer(folder, name, options)
    dtype = checkpoint_dtype(config, weights.dtype)
    assert dtype is not None  # the converter writes it
    _read_weights(folder, config, dtype, name, options)


def _read_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, name: str, options: LoadOptions
) -> PreTrainedModel:
    """The model with every weight read from the folder's safetensors: on the CPU, or where
    ``options.spread`` puts it.
    """
    from transformers import AutoModelForCausalLM

    with failing_as_model_error(f"{name}: cannot load the model"), quiet_libraries():
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed, and refused below
            trust_remote_code=options.trust_remote_code,
            local_files_only=options.offline or not options.trust_remote_code,
            **spread_arguments(options.spread, config, name),
        )
    _require_complete(info, model, name)
    return model


def _read_in(model: PreTrainedModel) -> None:
    """Touch every page of weights on the CPU, which are mapped from the file and not yet read.

    Otherwise the disk would be read, and counted, within the first forward.
    """
    page = 4096  # bytes; the smallest in use
    for parameter in map(local, model.parameters()):
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            parameter.data.view(-1)[:: page // parameter.element_size()].sum()


def _require_complete(info: dict[str, Any], model: PreTrainedModel, name: str) -> None:
    """Raise ModelError when weights are missing, have the wrong shape, or are of further layers.

    transformers fills the first two with random numbers and goes on. Keys that a model ties to
    others it does not list.
    """
    mismatched = sorted(str(entry[0]) for entry in info.get("mismatched_keys") or ())
    missing = sorted(str(key) for key in info.get("missing_keys") or ())
    for keys, problem in ((missing, "lacks"), (mismatched, "has the wrong shape for")):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ModelError(
                f"{name}: the checkpoint {problem} {', '.join(keys[:3])}{more}, "
                "so it does not fit its config.json"
            )
    unused = sorted(str(key) for key in info.get("unexpected_keys") or ())
    if beyond := _of_further_layers(unused, model):
        raise ModelError(f"{name}: its files hold {beyond}, and its config.json has fewer layers")
    if unused:
        logger.warning(
            "%s: its files hold %d tensors that its config.json has no place for, such as %s",
            *(name, len(unused), unused[0]),
        )
    if info.get("error_msgs"):
        raise ModelError(f"{name}: {info['error_msgs'][0]}")


def _of_further_layers(unused: list[str], model: PreTrainedModel) -> str | None:
    """The first unused tensor that is a layer's of the model in all but the layer's number."""
    decoder = decoder_config(model.config)
    # Layers that predict further tokens are stored behind the others, and are not needed.
    further = getattr(decoder, "num_nextn_predict_layers", 0) or 0
    layers = int(decoder.num_hidden_layers) + further
    known = model.state_dict().keys() if unused else ()
    for key in unused:
        found = _LAYER.search(key)
        if found and int(found[1]) >= layers and _LAYER.sub(".0.", key, count=1) in known:
            return key
    return None
