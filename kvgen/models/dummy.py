"""Random weights for an architecture that is not downloaded: time and bytes are real, text is not.

Imports torch and transformers inside the functions.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.errors import UsageError
from kvgen.models.causal import (
    checkpoint_dtype,
    context_limit,
    decoder_config,
    read_causal_config,
    stop_ids,
)
from kvgen.models.device import check_dtype_name, choose_device, choose_dtype
from kvgen.models.failures import failing_as_model_error
from kvgen.models.products import choose_products
from kvgen.models.quiet import quiet_libraries
from kvgen.models.tokenizers import has_tokenizer, load_tokenizer
from kvgen.models.types import LoadedModel, LoadOptions, ModelSource
from kvgen.models.weights import read_architecture_file, read_config
from kvgen.storage import cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_SEED = 0  # the same numbers every time, so that runs can be repeated


def load_dummy(options: LoadOptions) -> LoadedModel:
    """The architecture that ``options.model`` describes, filled with random numbers.

    ``options.model`` is a file written like a config.json, or a folder that has one; weights there
    are not read. A folder's tokenizer is used, else a trivial one that knows bytes. Raises
    ``UsageError`` without such a file, ``ModelError`` for one that describes no decoder, and
    ``InputError`` when memory runs out.
    """
    import torch
    from transformers import AutoModelForCausalLM

    check_dtype_name(options.dtype)
    device = choose_device(options.device)
    name, path = _architecture(options)
    started = time.perf_counter()
    config = _config(name, path, options)
    dtype = choose_dtype(options.dtype, checkpoint_dtype(config, None), device)
    subject = f"{name}: cannot build the model"
    with failing_as_model_error(subject), quiet_libraries(), torch.random.fork_rng():
        torch.manual_seed(_SEED)
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=options.trust_remote_code
            )
        model = model.to(device).eval().requires_grad_(False)
    loaded = time.perf_counter()
    decoder = decoder_config(model.config)
    tokenizer = _tokenizer(path, name, decoder, options)
    tokenized = time.perf_counter()
    return LoadedModel(
        source=ModelSource(name, "random weights", path),
        model=model,
        tokenizer=tokenizer,
        config=decoder,
        dtype=dtype,
        device=device,
        stop_ids=stop_ids((tokenizer, model.config, decoder, model.generation_config)),
        context_limit=context_limit(decoder),
        load_s=loaded - started,
        tokenizer_s=tokenized - loaded,
        attention=options.attention,
        products=choose_products(model, cache_root()) if options.tune == "auto" else {},
    )


def _architecture(options: LoadOptions) -> tuple[str, Path]:
    """The model's name and the file or folder that describes it."""
    if options.model is None:
        raise UsageError(
            "--load-format dummy needs --model FILE, an architecture file as a config.json is"
        )
    path = Path(options.model).expanduser()
    if not path.exists() or (path.is_file() and path.suffix.lower() != ".json"):
        raise UsageError(
            f"--load-format dummy reads an architecture, and {options.model} is neither a .json "
            "file nor a folder with a config.json"
        )
    return options.model, path


def _config(name: str, path: Path, options: LoadOptions) -> PreTrainedConfig:
    unusable = f"{name}: cannot use its configuration"
    if path.is_dir():
        with failing_as_model_error(unusable), quiet_libraries():
            return read_causal_config(path, read_config(path, name), name, options)
    raw = read_architecture_file(path, name)
    # transformers reads a configuration from a folder under one fixed name only.
    folder = Path(tempfile.mkdtemp(prefix="kvgen-"))
    try:
        shutil.copyfile(path, folder / "config.json")
        with failing_as_model_error(unusable), quiet_libraries():
            return read_causal_config(folder, raw, name, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tokenizer(path: Path, name: str, config: Any, options: LoadOptions) -> PreTrainedTokenizerBase:
    if path.is_dir() and has_tokenizer(path):
        return load_tokenizer(path, name, options)
    return byte_tokenizer(int(config.vocab_size))


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """One id per byte, as far as ``vocab_size`` goes; bytes beyond share id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=alphabet[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=alphabet[0])
