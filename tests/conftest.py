"""What all tests share: no network, a tiny model on disk, the real model when it is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from scripts_project import Project

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests run side by side; threads that wait for each other by spinning would eat their time.
os.environ["OMP_NUM_THREADS"] = "1"
# Where the run was started in the background Ctrl-C is ignored, and programs started from here
# would inherit that; the tests of Ctrl-C need it as a person's terminal has it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in [name for name in os.environ if name.startswith("KVGEN_")]:
    if name != "KVGEN_CACHE_DIR":
        del os.environ[name]

if TYPE_CHECKING:
    from kvgen.models import LoadedModel


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer, saved as a model folder."""
    from tiny import save_tiny_llama

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    save_tiny_llama(folder, initializer_range=0.5)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    """The same, loaded. Whoever changes the model puts it back."""
    from kvgen.models import LoadOptions, load_model

    return load_model(LoadOptions(str(tiny_folder)))


@pytest.fixture(scope="session")
def smollm() -> LoadedModel:
    """The default model in float32, from wherever it is on this machine."""
    from kvgen.models import LoadOptions, load_model

    return load_model(LoadOptions(dtype="float32"))


class Done(NamedTuple):
    """What one command line left behind."""

    returncode: int
    stdout: str
    stderr: str


Cli = Callable[..., Done]


@pytest.fixture
def process() -> Cli:
    """Run ``kvgen`` as a process of its own. It takes seconds to start: for what needs it."""

    def run(*arguments: str | Path, stdin: str = "", timeout: float = 120) -> Done:
        command = [sys.executable, "-m", "kvgen", *map(str, arguments)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a ``kvgen`` command line in this process."""
    from kvgen.cli.main import run as run_line

    def run(*arguments: str | Path) -> Done:
        code = run_line([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the installed transformers is too old for, saying so."""
    from importlib.metadata import version

    installed = tuple(int(part) for part in version("transformers").split(".")[:2])
    if installed >= (5, 24):
        return
    reason = f"needs the families of transformers 5.24; {version('transformers')} is installed"
    for item in items:
        if item.get_closest_marker("newest"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many model types the matrix has proven in this run."""
    passed = terminalreporter.stats.get("passed", [])
    proven = sum("test_a_type_is_served_exactly" in report.nodeid for report in passed)
    if proven:
        terminalreporter.write_line(f"model types proven against their uncached forward: {proven}")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def ready(project: Project) -> Project:
    """A project whose environment is made and current."""
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert project.builds() == 1
    return project
