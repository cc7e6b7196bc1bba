"""What all tests share: no network, a tiny model on disk, the real model when it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests run side by side; threads that wait for each other by spinning would eat their time.
os.environ["OMP_NUM_THREADS"] = "1"
for name in [name for name in os.environ if name.startswith("KVGEN_")]:
    if name != "KVGEN_CACHE_DIR":
        del os.environ[name]

if TYPE_CHECKING:
    from kvgen.models import LoadedModel

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer, saved as a model folder."""
    from tiny import save_tiny_llama

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    save_tiny_llama(folder, initializer_range=0.5)
    return folder


@pytest.fixture(scope="session")
def smollm() -> LoadedModel:
    """The default model in float32, from wherever it is on this machine."""
    from kvgen.models import LoadOptions, load_model

    return load_model(LoadOptions(dtype="float32"))


@pytest.fixture
def cli() -> Cli:
    """Run ``kvgen`` as a process of its own."""

    def run(*arguments: str | Path, timeout: float = 120, **settings: object):  # type: ignore[no-untyped-def]
        command = [sys.executable, "-m", "kvgen", *map(str, arguments)]
        settings = {"stdin": subprocess.DEVNULL} | settings if "input" not in settings else settings
        return subprocess.run(  # type: ignore[call-overload]
            command, capture_output=True, text=True, timeout=timeout, **settings
        )

    return run
