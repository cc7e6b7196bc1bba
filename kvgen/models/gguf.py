"""Converts a GGUF file into a safetensors folder, once. Heavy imports inside the functions.

transformers reads GGUF tensors itself but its loader wants another package for that; this goes
through the same reader, keeps what it returns as float32 safetensors, and checks the result the
way every model folder is checked before it is published in the cache.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvgen.errors import ModelError
from kvgen.models import store
from kvgen.models.causal import build_skeleton
from kvgen.models.failures import failing_as_model_error, one_line
from kvgen.models.gguf_header import check_whole
from kvgen.models.gguf_tokenizer import build_tokenizer
from kvgen.models.quiet import quiet_libraries
from kvgen.models.types import ModelSource, ProgressCallback, no_progress
from kvgen.models.weights import SINGLE_FILE
from kvgen.storage import ENVIRONMENT_VARIABLE, cache_root

logger = logging.getLogger("kvgen")

_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_FULL = re.compile(r"no space left|disk quota|os error 28\b|os error 122\b", re.IGNORECASE)
# Percent of the whole at which each stage ends, as measured for a 135M model.
_CONFIG_DONE, _TENSORS_DONE, _WRITTEN, _TOKENIZER_DONE = 60, 85, 90, 95


def convert(
    source: ModelSource,
    check: Callable[[Path], None],
    progress: ProgressCallback = no_progress,
) -> Path:
    """The safetensors folder for the GGUF file ``source.path``, converted unless already there.

    ``check(folder)`` raises ModelError when what was written does not load. When the cache cannot
    be written, the conversion serves this process only and a warning says so. Raises ModelError
    when the file cannot be converted or the disk is full.
    """
    file, name = source.path, source.name
    split = _SPLIT.search(file.name)
    if split and int(split[1]) > 1:
        raise ModelError(f"{name}: one part of a split GGUF; merge the parts into one file first")

    check_whole(file, name)

    def write(folder: Path) -> None:
        with _explaining_full_disk(name), failing_as_model_error(f"{name}: cannot convert"):
            _write_folder(file, folder, name, progress)
        check(folder)
        progress(_stage(name), 100, 100)

    try:
        return store.publish(source.sha256 or store.content_hash(file), write, progress)
    except OSError as error:
        if _is_full(error):
            raise _full_disk(name, cache_root()) from error
        logger.warning(
            "cannot keep the converted model in %s (%s); converting for this run only; "
            "set %s to a folder that can be written",
            cache_root(),
            one_line(error),
            ENVIRONMENT_VARIABLE,
        )
        return _convert_for_this_run(write)


def _convert_for_this_run(write: Callable[[Path], None]) -> Path:
    with failing_as_model_error("no temporary folder to convert in"):
        folder = Path(tempfile.mkdtemp(prefix="kvgen-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write(folder)
    return folder


def _write_folder(file: Path, folder: Path, name: str, progress: ProgressCallback) -> None:
    """Write config, weights and tokenizer of a GGUF file into an empty folder."""
    import gguf
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    what = _stage(name)
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with quiet_libraries(), _reading_once():
        progress(what, 0, 100)
        config = AutoConfig.from_pretrained(**place, local_files_only=True)
        skeleton = build_skeleton(config, name)
        _check_space(skeleton, folder, name)
        progress(what, _CONFIG_DONE, 100)
        tensors = _read_tensors(file, skeleton, what, progress)
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        del tensors  # hundreds of megabytes that the stages below do not need
        progress(what, _WRITTEN, 100)
        tokenizer = build_tokenizer(gguf.GGUFReader(str(file)))
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True)
        tokenizer.save_pretrained(folder)
        config.architectures = [type(skeleton).__name__]
        config.dtype = "float32"
        config.save_pretrained(folder)
        progress(what, _TOKENIZER_DONE, 100)


def _read_tensors(
    file: Path, skeleton: Any, what: str, progress: ProgressCallback
) -> dict[str, Any]:
    """The file's tensors in float32, under the skeleton's parameter names."""
    from transformers import modeling_gguf_pytorch_utils as reader

    # The reader draws a bar on stderr that cannot be switched off: count in its place.
    def counted(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        listed = list(tensors)
        for done, tensor in enumerate(listed, start=1):
            yield tensor
            share = (_TENSORS_DONE - _CONFIG_DONE) * done // len(listed)
            progress(what, _CONFIG_DONE + share, 100)

    with _replaced(reader, "tqdm", counted):
        read = reader.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton)
    return {key: tensor.contiguous() for key, tensor in read["tensors"].items()}


@contextlib.contextmanager
def _reading_once() -> Iterator[None]:
    """Have the file's header parsed once instead of three times, and its name table built once.

    Config, weights and tokenizer each open the file anew, and the name table is rebuilt for every
    module of the model; parsing in Python is most of the time a conversion takes.
    """
    import gguf

    open_once = functools.lru_cache(maxsize=1)(gguf.GGUFReader)
    name_once = functools.lru_cache(maxsize=8)(gguf.get_tensor_name_map)
    with (
        _replaced(gguf, "GGUFReader", open_once),
        _replaced(gguf, "get_tensor_name_map", name_once),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: Any, attribute: str, value: Any) -> Iterator[None]:
    """Give a module's attribute another value for a while."""
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    try:
        yield
    finally:
        setattr(module, attribute, before)


def _check_space(skeleton: Any, folder: Path, name: str) -> None:
    """Refuse before writing what the disk cannot hold: a mapped write there would crash."""
    needed = 4 * sum(parameter.numel() for parameter in skeleton.parameters()) + (32 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _full_disk(name, folder.parent, f"{_mib(needed)} needed, {_mib(free)} free")


@contextlib.contextmanager
def _explaining_full_disk(name: str) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        if error.__cause__ is not None and _is_full(error.__cause__):
            raise _full_disk(name, cache_root()) from error
        raise


def _is_full(error: BaseException) -> bool:
    full = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
    return getattr(error, "errno", None) in full or bool(_FULL.search(str(error)))


def _full_disk(name: str, folder: Path, numbers: str = "no space left") -> ModelError:
    return ModelError(
        f"{name}: cannot convert, the disk of {folder} is full ({numbers}); free some space or set "
        f"{ENVIRONMENT_VARIABLE} to a folder elsewhere"
    )


def _stage(name: str) -> str:
    return f"converting {Path(name).name} to safetensors, once"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
