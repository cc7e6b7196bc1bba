"""Fetches a model from the Hugging Face Hub, or finds it in the Hub's local cache.

Imports huggingface_hub inside the functions. Asks only for the files a model is loaded from: JSON,
tokenizer files and the safetensors that would be read; never pickles, never code unless trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvgen.errors import ModelError
from kvgen.models import weights
from kvgen.models.failures import failing_as_model_error
from kvgen.models.quiet import quiet_hub, quiet_libraries
from kvgen.models.types import LoadOptions, ProgressCallback, no_progress

_METADATA = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_SUBFOLDERS = ["*/*"]  # other formats of the same model live there
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of a Hub id: ``model`` or ``owner/model``."""
    return bool(_ID.fullmatch(name)) and len(name) <= 96


def fetch(
    hub_id: str, options: LoadOptions, progress: ProgressCallback = no_progress
) -> tuple[Path, str]:
    """The snapshot folder holding the model's files, and its commit.

    Offline, only what is already in the local Hub cache is used. Raises ModelError when the model
    or the revision does not exist, is not open to the user, or cannot be reached.
    """
    patterns = [*_METADATA, *(["*.py"] if options.trust_remote_code else [])]
    folder = _snapshot(hub_id, options.revision, patterns, options.offline, progress)
    index = folder / weights.INDEX_FILE
    wanted = [weights.SINGLE_FILE]
    if index.is_file():
        wanted += weights.read_shard_names(index, hub_id)
    if not all((folder / file).is_file() for file in wanted[1:] or wanted):
        folder = _snapshot(hub_id, folder.name, wanted, options.offline, progress)
    return folder, folder.name


def fetch_file(hub_id: str, file: str, options: LoadOptions) -> Path | None:
    """One small file of a model, from the local Hub cache or the Hub; ``None`` if it has no such.

    Raises ModelError as ``fetch`` does.
    """
    import huggingface_hub
    from huggingface_hub import constants

    cached = huggingface_hub.try_to_load_from_cache(hub_id, file, revision=options.revision)
    if isinstance(cached, str):
        return Path(cached)
    offline = options.offline or constants.HF_HUB_OFFLINE
    if offline and huggingface_hub.try_to_load_from_cache(hub_id, "config.json"):
        return None
    # Not quiet_libraries: it would load transformers to silence it.
    utilities: Any = huggingface_hub.utils  # untyped exports
    utilities.disable_progress_bars()
    with _explaining(hub_id, options.revision, options.offline), quiet_hub():
        # Of a single file the library would ask again and again where nobody answers.
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=options.revision,
            allow_patterns=[file],
            local_files_only=options.offline,
        )
    path = Path(folder) / file
    return path if path.is_file() else None


def _snapshot(
    hub_id: str,
    revision: str | None,
    patterns: list[str],
    offline: bool,
    progress: ProgressCallback,
) -> Path:
    import huggingface_hub

    with _explaining(hub_id, revision, offline), quiet_libraries():
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_SUBFOLDERS,
            local_files_only=offline,
            tqdm_class=_bar_class(f"downloading {hub_id}", progress),
        )
    return Path(folder)


@contextmanager
def _explaining(hub_id: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Turn a failure into ModelError with what it means for the user."""
    with failing_as_model_error(hub_id):
        try:
            yield
        except Exception as error:
            reason = _explain(error, revision, offline)
            if reason is None:
                raise
            raise ModelError(f"{hub_id}: {reason}") from error


def _explain(error: Exception, revision: str | None, offline: bool) -> str | None:
    """What a Hub error means for the user, None when its own text says it best."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "access to this model must be granted on the Hub first; then log in and try again"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model exists but has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "neither a local folder nor a model on the Hub (or a private one: log in first)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if offline or constants.HF_HUB_OFFLINE:
            return (
                "neither a local folder nor complete in the local Hub cache, and offline mode is on"
            )
        return "neither a local folder nor in the local Hub cache, and the Hub cannot be reached"
    return None


def _bar_class(what: str, progress: ProgressCallback) -> type[Any]:
    """A tqdm class that draws nothing and reports bytes to ``progress``.

    The Hub library keeps several byte bars (received, written) for one download; the furthest one
    is reported.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    counts: dict[int, int] = {}

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")
            counts[id(self)] = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            counts[id(self)] = counts.get(id(self), 0) + int(n or 0)
            if self.counts_bytes and self.total:
                progress(what, max(counts.values()), int(self.total))

    return Bar
